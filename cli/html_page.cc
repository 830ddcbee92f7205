// SPDX-License-Identifier: Apache-2.0
#include "cli/html_page.h"

#include <fmt/core.h>

#include "cli/svg_chart.h"

namespace twell::cli {
namespace {

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --line: #d9dee5; --page: #ffffff; --card: #f5f7fa;
  --c0: #1f6feb; --c1: #e07b00; --c2: #1a9e77; --c3: #8a63d2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa5b4; --line: #333b47;
  --page: #14181f; --card: #1d232c; --c0: #6aa6ff; --c1: #ffa64d; --c2: #4fd0a8; --c3: #b79cf5; } }
body { margin: 0 auto; max-width: 980px; padding: 24px; color: var(--ink);
  background: var(--page); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 4px; }
p { color: var(--soft); margin: 4px 0 12px; max-width: 75ch; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 12px;
  margin: 20px 0; }
.cards div { background: var(--card); border-radius: 8px; padding: 10px 14px; }
.cards b { display: block; font-size: 18px; }
.cards span { display: block; color: var(--soft); font-size: 13px; line-height: 1.3; }
.bad { color: #d1242f; }
svg { display: block; width: 100%; height: auto; font: 11px system-ui, sans-serif; }
svg text { fill: var(--soft); }
.grid { stroke: var(--line); fill: none; }
.rule { stroke: var(--ink); stroke-dasharray: 4 3; fill: none; }
.series-0 { --c: var(--c0); } .series-1 { --c: var(--c1); }
.series-2 { --c: var(--c2); } .series-3 { --c: var(--c3); }
.fill { fill: var(--c); } .soft { opacity: 0.3; }
.line { fill: none; stroke: var(--c); stroke-width: 2; }
.faint { stroke-width: 1; opacity: 0.25; }
.legend { display: flex; flex-wrap: wrap; gap: 0 18px; color: var(--soft); font-size: 13px; }
.legend i { display: inline-block; width: 14px; margin-right: 6px; vertical-align: middle; }
.legend .fill { height: 8px; background: var(--c); }
.legend .rule { border-top: 1px dashed var(--ink); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 10px; text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 500; border-bottom: 1px solid var(--line); }
td.text, th.text { text-align: left; }
td.text { font-family: ui-monospace, monospace; white-space: pre; }
td.long { white-space: pre-wrap; overflow-wrap: anywhere; }
.pair { display: flex; flex-wrap: wrap; gap: 48px; }
@media (max-width: 760px) {
  body { padding: 16px; }
  svg { font-size: 20px; }
  .more { display: none; }
  th, td { padding: 3px 8px; white-space: normal; }
  td.text { white-space: pre-wrap; overflow-wrap: anywhere; }
  /* A row's figures stand below each other, each with its name. */
  .figures, .figures tbody { display: block; }
  .figures tr { display: grid; grid-template-columns: repeat(auto-fill, minmax(140px, 1fr));
    border-bottom: 1px solid var(--line); padding: 6px 0; gap: 0 16px; }
  .figures th { display: none; }
  .figures td { display: flex; justify-content: space-between; padding: 1px 0; }
  .figures td::before { content: attr(title); color: var(--soft); }
}
)";

}  // namespace

std::string html_head(const std::string& title) {
  const std::string escaped = html_escape(title);
  return fmt::format(
      "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
      "<meta name='viewport' content='width=device-width, initial-scale=1'>\n<title>{}</title>\n"
      "<style>{}</style>\n</head>\n<body>\n<h1>{}</h1>\n",
      escaped, kStyle, escaped);
}

std::string html_card(const std::string& value, const char* label) {
  return fmt::format("<div><b>{}</b><span>{}</span></div>\n", html_escape(value), label);
}

std::string short_count(int64_t count) {
  constexpr int64_t kRoundsToAMillion = 999'950;
  if (count < 1000) return fmt::format("{}", count);
  if (count < kRoundsToAMillion) return fmt::format("{:.1f} k", static_cast<double>(count) * 1e-3);
  return fmt::format("{:.1f} M", static_cast<double>(count) * 1e-6);
}

}  // namespace twell::cli
