// SPDX-License-Identifier: Apache-2.0
// The beginning of a page with plots (svg_chart.h), in one file without anything from elsewhere.
#pragma once

#include <string>

namespace twell::cli {

// Up to the title as a heading; "</body></html>" ends the page. The style sheet knows cards
// (div.cards), tables, and the colours of charts, in light and dark.
std::string html_head(const std::string& title);

}  // namespace twell::cli
