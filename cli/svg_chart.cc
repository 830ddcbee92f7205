// SPDX-License-Identifier: Apache-2.0
#include "cli/svg_chart.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string_view>

namespace twell::cli {
namespace {

constexpr double kWidth = 720, kHeight = 246;
constexpr double kLeft = 64, kRight = 16, kTop = 12, kBottom = 48;
constexpr double kPlotWidth = kWidth - kLeft - kRight, kPlotHeight = kHeight - kTop - kBottom;
constexpr size_t kMostLabels = 20;   // most categories that get a label
constexpr size_t kNarrowLabels = 3;  // on a narrow page one of so many of them is shown

std::string number(double value) {
  if (value != 0.0 && std::abs(value) < 10.0 && value != std::round(value)) {
    return fmt::format("{:.3g}", value);
  }
  const int digits = std::abs(value) < 100.0 && value != std::round(value) ? 1 : 0;
  return fmt::format("{:.{}f}", value, digits);
}

// Axis ticks 0, step, 2 step, .. with a round step: at most five, up to the first at or above
// `highest`.
std::vector<double> linear_ticks(double highest) {
  const double top = highest > 0.0 ? highest : 1.0;
  const double rough = top / 5.0;
  const double magnitude = std::pow(10.0, std::floor(std::log10(rough)));
  double step = 10.0 * magnitude;
  for (const double factor : {5.0, 2.0, 1.0}) {
    if (factor * magnitude >= rough) step = factor * magnitude;
  }
  std::vector<double> ticks;
  for (int i = 0; ticks.empty() || ticks.back() < top; ++i) ticks.push_back(i * step);
  return ticks;
}

std::vector<double> log_ticks(double highest) {
  std::vector<double> ticks = {1.0};
  while (ticks.back() < highest) ticks.push_back(10.0 * ticks.back());
  if (ticks.size() == 1) ticks.push_back(10.0);
  return ticks;
}

}  // namespace

std::string html_escape(const std::string& text) {
  static const std::map<char, std::string_view> kEscapes = {
      {'&', "&amp;"}, {'<', "&lt;"}, {'>', "&gt;"}, {'"', "&quot;"}, {'\'', "&#39;"}};
  std::string out;
  for (const char c : text) {
    const auto escape = kEscapes.find(c);
    out += escape == kEscapes.end() ? std::string_view(&c, 1) : escape->second;
  }
  return out;
}

SvgChart::SvgChart(std::vector<std::string> categories, std::string category_label, Axis axis,
                   double highest)
    : categories_(std::move(categories)),
      category_label_(std::move(category_label)),
      axis_(std::move(axis)),
      ticks_(axis_.log ? log_ticks(highest) : linear_ticks(highest)) {
  highest_ = ticks_.back();
}

double SvgChart::slot() const {
  return kPlotWidth / static_cast<double>(std::max<size_t>(categories_.size(), 1));
}

double SvgChart::x(size_t category) const {
  return kLeft + slot() * (static_cast<double>(category) + 0.5);
}

double SvgChart::y(double value) const {
  const double share =
      axis_.log ? std::log(std::max(value, 1.0)) / std::log(highest_) : value / highest_;
  return kTop + kPlotHeight * (1.0 - share);
}

std::string SvgChart::tip(const std::string& name, size_t category, double value) const {
  return fmt::format("<title>{} {}{}{}: {}{}</title>", html_escape(category_label_),
                     html_escape(categories_[category]), name.empty() ? "" : ", ",
                     html_escape(name), number(value), axis_.unit);
}

void SvgChart::legend(const Series& series, const char* shape) {
  if (series.name.empty()) return;
  legend_item(series.name, fmt::format("{} series-{}", shape, series.color));
}

void SvgChart::legend_item(const std::string& name, const std::string& mark) {
  legend_ += fmt::format("<span><i class='{}'></i>{}</span>\n", mark, html_escape(name));
}

void SvgChart::bars(const std::vector<Series>& series) {
  const double width = 0.76 * slot() / static_cast<double>(series.size());
  for (size_t s = 0; s < series.size(); ++s) {
    for (size_t i = 0; i < categories_.size(); ++i) {
      const double value = series[s].values[i];
      const double left = x(i) - 0.38 * slot() + width * static_cast<double>(s);
      marks_ += fmt::format(
          "<rect class='fill series-{}' x='{:.2f}' y='{:.2f}' width='{:.2f}' height='{:.2f}'>{}"
          "</rect>\n",
          series[s].color, left, y(value), 0.94 * width, kTop + kPlotHeight - y(value),
          tip(series[s].name, i, value));
    }
    legend(series[s], "fill");
  }
}

void SvgChart::ranges(const Series& low, const Series& high) {
  const double width = std::min(0.5 * slot(), 18.0);
  for (size_t i = 0; i < categories_.size(); ++i) {
    const double top = y(high.values[i]);
    marks_ += fmt::format(
        "<rect class='fill soft series-{}' x='{:.2f}' y='{:.2f}' width='{:.2f}' height='{:.2f}'>"
        "<title>{} {}: {} to {}{}</title></rect>\n",
        low.color, x(i) - 0.5 * width, top, width, std::max(y(low.values[i]) - top, 1.0),
        html_escape(category_label_), html_escape(categories_[i]), number(low.values[i]),
        number(high.values[i]), axis_.unit);
  }
  legend(low, "fill soft");
}

void SvgChart::line(const Series& series, bool faint) {
  std::string points;
  for (size_t i = 0; i < categories_.size(); ++i) {
    points += fmt::format("{:.2f},{:.2f} ", x(i), y(series.values[i]));
  }
  marks_ += fmt::format(
      "<polyline class='line {}series-{}' points='{}'><title>{}</title>"
      "</polyline>\n",
      faint ? "faint " : "", series.color, points, html_escape(series.name));
  if (!faint) {
    dots(series);
  }
}

void SvgChart::dots(const Series& series) {
  for (size_t i = 0; i < categories_.size(); ++i) {
    marks_ += fmt::format(
        "<circle class='fill series-{}' cx='{:.2f}' cy='{:.2f}' r='3.2'>{}"
        "</circle>\n",
        series.color, x(i), y(series.values[i]), tip(series.name, i, series.values[i]));
  }
  legend(series, "fill");
}

void SvgChart::rule(double value, const std::string& label) {
  marks_ +=
      fmt::format("<path class='rule' d='M{:.1f} {:.2f}h{:.1f}'/>\n", kLeft, y(value), kPlotWidth);
  legend_item(label, "rule");
}

std::string SvgChart::frame() const {
  std::string out;
  for (const double tick : ticks_) {
    out += fmt::format(
        "<path class='grid' d='M{:.1f} {:.2f}h{:.1f}'/><text x='{:.1f}' y='{:.2f}' "
        "text-anchor='end'>{}{}</text>\n",
        kLeft, y(tick), kPlotWidth, kLeft - 6.0, y(tick) + 4.0, number(tick), axis_.unit);
  }
  const size_t every = std::max<size_t>((categories_.size() + kMostLabels - 1) / kMostLabels, 1);
  const bool many = categories_.size() > kMostLabels / kNarrowLabels;
  for (size_t i = 0; i < categories_.size(); i += every) {
    const bool left_out = many && i / every % kNarrowLabels != 0;
    out += fmt::format("<text{} x='{:.2f}' y='{:.1f}' text-anchor='middle'>{}</text>\n",
                       left_out ? " class='more'" : "", x(i), kTop + kPlotHeight + 18.0,
                       html_escape(categories_[i]));
  }
  out += fmt::format("<text x='{:.1f}' y='{:.1f}' text-anchor='middle'>{}</text>\n",
                     kLeft + 0.5 * kPlotWidth, kHeight - 6.0, html_escape(category_label_));
  return out;
}

std::string SvgChart::svg() const {
  return fmt::format(
      "<div class='legend'>\n{}</div>\n<svg viewBox='0 0 {} {}' role='img' "
      "aria-label='{}'>\n{}{}</svg>\n",
      legend_, kWidth, kHeight, html_escape(axis_.label + " by " + category_label_), frame(),
      marks_);
}

}  // namespace twell::cli
