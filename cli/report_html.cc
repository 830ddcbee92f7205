// SPDX-License-Identifier: Apache-2.0
#include "cli/report_html.h"

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "cli/html_page.h"
#include "cli/svg_chart.h"

namespace twell::cli {
namespace {

using Rows = std::vector<nlohmann::json>;
using Values = std::vector<double>;

constexpr size_t kSampledSteps = 8;  // of which texts are shown
constexpr size_t kPoints = 60;       // of a curve; each is the mean of the steps around it

double highest(const std::vector<Values>& curves) {
  double most = 0.0;
  for (const Values& curve : curves) {
    for (const double value : curve) most = std::max(most, value);
  }
  return most > 0.0 ? most : 1.0;
}

// Consecutive rows in groups of about equal size.
class Course {
 public:
  explicit Course(Rows rows) : rows_(std::move(rows)) {
    groups_ = std::min(rows_.size(), kPoints);
    for (size_t i = 0; i < groups_; ++i) {
      steps_.push_back(std::to_string(rows_[end(i) - 1].at("step").get<int64_t>()));
    }
  }
  size_t size() const { return groups_; }
  const std::vector<std::string>& steps() const { return steps_; }
  // The mean of a figure in each group.
  Values means(const std::function<double(const nlohmann::json& row)>& figure) const {
    Values out;
    for (size_t i = 0; i < groups_; ++i) {
      double sum = 0.0;
      for (size_t row = begin(i); row < end(i); ++row) sum += figure(rows_[row]);
      out.push_back(sum / static_cast<double>(end(i) - begin(i)));
    }
    return out;
  }
  Values means(const char* name) const {
    return means([&](const nlohmann::json& row) { return row.at(name).get<double>(); });
  }

 private:
  size_t begin(size_t group) const { return group * rows_.size() / groups_; }
  size_t end(size_t group) const { return (group + 1) * rows_.size() / groups_; }

  Rows rows_;
  size_t groups_ = 0;
  std::vector<std::string> steps_;
};

class Page {
 public:
  Page(const nlohmann::json& report, const Rows& metrics)
      : report_(report),
        trained_(rows_with("ce", metrics)),
        validated_(rows_with("val_ce", metrics)),
        sampled_(rows_with("samples", metrics)) {}

  std::string html(const nlohmann::json& last) {
    out_ = html_head("Training of " + report_.at("checkpoint").get<std::string>());
    cards();
    loss();
    if (trained_.size() > 0) {
      activity(last);
      chart("Speed", "Trained tokens per second.", trained_, "tokens/s", "",
            {{"", trained_.means("tokens_per_s"), 2}});
    }
    samples();
    return out_ + "</body>\n</html>\n";
  }

 private:
  void card(const std::string& value, const char* label) { out_ += html_card(value, label); }
  void cards() {
    out_ += "<div class='cards'>\n";
    card(short_count(report_.at("parameters").get<int64_t>()), "parameters");
    card(fmt::format("{}", report_.at("steps").get<int64_t>()), "steps");
    card(short_count(report_.at("tokens").get<int64_t>()), "tokens");
    card(fmt::format("{:.4f}", report_.at("val_ce_last").get<double>()),
         "validation loss, nats per token");
    out_ += "</div>\n";
  }

  // `faint`: curves without points, behind the others.
  void chart(const char* title, const std::string& text, const Course& course, const char* label,
             const char* unit, const std::vector<SvgChart::Series>& curves,
             const std::vector<SvgChart::Series>& faint = {}) {
    std::vector<Values> all;
    for (const auto* some : {&curves, &faint}) {
      for (const SvgChart::Series& curve : *some) all.push_back(curve.values);
    }
    SvgChart drawn(course.steps(), "step", {.label = label, .unit = unit}, highest(all));
    for (const SvgChart::Series& curve : faint) drawn.line(curve, true);
    for (const SvgChart::Series& curve : curves) drawn.line(curve);
    out_ += fmt::format("<h2>{}</h2>\n<p>{}</p>\n{}", title, text, drawn.svg());
  }

  void loss() {
    if (trained_.size() > 0) {
      chart("Loss", "Cross-entropy of the batches, in nats per token, before they are trained on.",
            trained_, "nats per token", "", {{"", trained_.means("ce"), 0}});
    }
    chart("Validation", "Cross-entropy of held-out text, in nats per token.", validated_,
          "nats per token", "", {{"", validated_.means("val_ce"), 1}});
  }

  void activity(const nlohmann::json& last) {
    const size_t count = last.at("layers").size();
    const auto layers = [&](const char* figure, double scale) {
      std::vector<SvgChart::Series> out;
      for (size_t i = 0; i < count; ++i) {
        out.push_back({fmt::format("layer {}", i), trained_.means([&](const nlohmann::json& row) {
                         return scale * row.at("layers").at(i).at(figure).get<double>();
                       }),
                       3});
      }
      return out;
    };
    chart("Active neurons",
          fmt::format("Per token, of {} in each layer; faint: each layer, else their mean.",
                      report_.at("ffn").get<int64_t>()),
          trained_, "active neurons", "", {{"", trained_.means("nnz"), 0}}, layers("nnz", 1.0));
    Values dead = trained_.means("dead_share");
    for (double& share : dead) share *= 100.0;
    chart("Dead neurons",
          "Share of the neurons that fired on no token of a step; faint: each layer, else their "
          "mean.",
          trained_, "dead neurons", "%", {{"", dead, 1}}, layers("dead_share", 100.0));
    std::vector<std::string> names;
    Values final_nnz;
    for (size_t i = 0; i < count; ++i) {
      names.push_back(std::to_string(i));
      final_nnz.push_back(last.at("layers").at(i).at("nnz").get<double>());
    }
    SvgChart bars(names, "layer", {.label = "active neurons"}, highest({final_nnz}));
    bars.bars({{"", final_nnz, 0}});
    out_ += "<h2>Active neurons by layer</h2>\n<p>Per token, in the last step.</p>\n" + bars.svg();
  }

  // Evenly spaced steps with texts, the first and the last among them.
  void samples() {
    if (sampled_.empty()) return;
    out_ +=
        "<h2>Texts</h2>\n<p>What the model writes behind each prompt, drawn at temperature "
        "0.8.</p>\n<table>\n<tr><th>step</th><th class='text'>text</th></tr>\n";
    const size_t shown = std::min(sampled_.size(), kSampledSteps);
    for (size_t i = 0; i < shown; ++i) {
      const nlohmann::json& row =
          sampled_[shown == 1 ? 0 : i * (sampled_.size() - 1) / (shown - 1)];
      for (const nlohmann::json& sample : row.at("samples")) {
        out_ += fmt::format("<tr><td>{}</td><td class='text long'><b>{}</b>{}</td></tr>\n",
                            row.at("step").get<int64_t>(),
                            html_escape(sample.at("prompt").get<std::string>()),
                            html_escape(sample.at("text").get<std::string>()));
      }
    }
    out_ += "</table>\n";
  }

  const nlohmann::json& report_;
  const Course trained_, validated_;
  const Rows sampled_;
  std::string out_;
};

}  // namespace

Rows rows_with(const char* field, const Rows& rows) {
  Rows out;
  for (const nlohmann::json& row : rows) {
    if (row.contains(field)) out.push_back(row);
  }
  return out;
}

std::string report_html(const nlohmann::json& report, const Rows& metrics) {
  return Page(report, metrics).html(metrics.back());
}

}  // namespace twell::cli
