// SPDX-License-Identifier: Apache-2.0
// Charts over categories (layers, positions), as inline SVG. Colours are the classes series-0,
// series-1, .. of the page's style sheet; every mark shows its value as a tooltip.
#pragma once

#include <string>
#include <vector>

namespace twell::cli {

// Escapes text for HTML content and attributes.
std::string html_escape(const std::string& text);

class SvgChart {
 public:
  struct Axis {
    std::string label;
    bool log = false;  // logarithmic; values below 1 are drawn at 1
    std::string unit;  // suffix of every value: "%", "x"
  };
  // `highest` is the largest value that will be drawn. The axis starts at 0, or at 1 when it is
  // logarithmic.
  SvgChart(std::vector<std::string> categories, std::string category_label, Axis axis,
           double highest);

  struct Series {
    std::string name;            // for tooltips and the legend; empty: not in the legend
    std::vector<double> values;  // one per category
    int color = 0;
  };
  // Draws bars side by side. Call it once with all series.
  void bars(const std::vector<Series>& series);
  // Draws vertical bars from `low` to `high`, one per category.
  void ranges(const Series& low, const Series& high);
  void line(const Series& series, bool faint = false);
  void dots(const Series& series);
  // Draws a labelled horizontal line at a reference value.
  void rule(double value, const std::string& label);

  std::string svg() const;  // behind its legend; as wide as the page, however narrow

 private:
  double x(size_t category) const;  // centre of a category
  double y(double value) const;
  double slot() const;  // width of a category
  std::string tip(const std::string& name, size_t category, double value) const;
  void legend(const Series& series, const char* shape);
  void legend_item(const std::string& name, const std::string& mark);  // mark: its CSS classes
  std::string frame() const;

  std::vector<std::string> categories_;
  std::string category_label_;
  Axis axis_;
  double highest_;
  std::vector<double> ticks_;
  std::string marks_;
  std::string legend_;
};

}  // namespace twell::cli
