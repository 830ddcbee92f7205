// SPDX-License-Identifier: Apache-2.0
// The beginning of a page with plots (svg_chart.h), in one file without anything from elsewhere.
#pragma once

#include <cstdint>
#include <string>

namespace twell::cli {

// Up to the title as a heading; "</body></html>" ends the page. The style sheet knows cards
// (div.cards), tables, and the colours of charts, in light and dark.
std::string html_head(const std::string& title);

// A card: a figure and what it is.
std::string html_card(const std::string& value, const char* label);

// A number of parameters or tokens in few characters: 224, 59.4 k, 1.5 M.
std::string short_count(int64_t count);

}  // namespace twell::cli
