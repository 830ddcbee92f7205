// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <algorithm>

#include "cli/html_page.h"
#include "cli/inspection.h"
#include "cli/svg_chart.h"

namespace twell::cli {
namespace {

class InspectionPage {
 public:
  explicit InspectionPage(const Inspection& inspection)
      : in_(inspection), ffn_(static_cast<double>(inspection.config.ffn)) {
    for (int64_t i = 0; i < in_.config.layers; ++i) layers_.push_back(std::to_string(i));
  }

  std::string html() {
    head();
    cards();
    if (in_.evaluation.tokens > 0) {
      activity();
      if (in_.profile) {
        speed();
        unions();
        silent();
        positions();
        tokens();
      }
      layer_table();
    }
    if (in_.damaged_tensors > 0) damage();
    return out_ + "</body>\n</html>\n";
  }

 private:
  using Series = SvgChart::Series;

  // One value per layer.
  template <typename Fn>
  std::vector<double> per_layer(const Fn& fn) const {
    std::vector<double> values;
    for (size_t i = 0; i < layers_.size(); ++i) values.push_back(static_cast<double>(fn(i)));
    return values;
  }
  template <typename Fn>
  std::vector<double> per_profile(const Fn& fn) const {
    return per_layer([&](size_t i) { return fn(in_.profile->layers[i]); });
  }
  template <typename Fn>
  std::vector<double> per_activity(const Fn& fn) const {
    return per_layer([&](size_t i) { return fn(in_.evaluation.layers[i]); });
  }
  static double highest(const std::vector<double>& values) {
    return values.empty() ? 1.0 : *std::max_element(values.begin(), values.end());
  }
  double percent(double neurons) const { return 100.0 * neurons / ffn_; }
  void section(const char* title, const std::string& text) {
    out_ += fmt::format("<h2>{}</h2>\n<p>{}</p>\n", title, text);
  }
  void card(const std::string& value, const char* label) { out_ += html_card(value, label); }

  void head() {
    out_ = html_head(in_.checkpoint);
    const ModelConfig& config = in_.config;
    out_ += fmt::format(
        "<p>{} layers of width {}, FFN of {} neurons ({}, {}), {} heads of {}, vocabulary of {}, "
        "context of {}.</p>\n",
        config.layers, config.width, config.ffn, activation_name(config.activation),
        config.gated ? "gated" : "not gated", config.heads, config.head_dim, config.vocab_size,
        config.context);
  }

  void cards() {
    out_ += "<div class='cards'>\n";
    card(short_count(in_.config.parameter_count()), "parameters");
    if (in_.evaluation.tokens > 0) {
      card(fmt::format("{:.4f}", in_.evaluation.cross_entropy()), "cross-entropy, nats per token");
      const double active = in_.evaluation.mean_active();
      card(fmt::format("{:.1f} ({:.2f}%)", active, percent(active)),
           "active neurons per token and layer");
    }
    if (in_.profile) {
      card(fmt::format("{:.2f}x", in_.profile->prompt().speedup()),
           "expected FFN speed-up, prompt");
      card(fmt::format("{:.2f}x", in_.profile->decode().speedup()),
           "expected FFN speed-up, decode");
    }
    if (in_.evaluation.tokens > 0) card(std::to_string(in_.evaluation.tokens), "tokens of text");
    out_ += "</div>\n";
  }

  void activity() {
    section("Active neurons per token",
            "How many neurons of a layer fire on a token: the mean, the median, and the upper "
            "percent from the 99th percentile to the busiest token. Logarithmic.");
    const auto max = per_activity([](const auto& layer) { return layer.max(); });
    SvgChart chart(layers_, "layer", {.label = "active neurons", .log = true, .unit = ""},
                   highest(max));
    chart.ranges(
        {"p99 to max", per_activity([](const auto& layer) { return layer.quantile(0.99); }), 0},
        {"", max, 0});
    chart.dots({"p50", per_activity([](const auto& layer) { return layer.quantile(0.5); }), 2});
    chart.dots({"mean", per_activity([](const auto& layer) { return layer.mean(); }), 0});
    out_ += chart.svg();
  }

  void speed() {
    section("Expected speed-up of the FFN",
            fmt::format("Against dense, gate projection included, with the execution that the {} "
                        "cost model finds cheapest: for a prompt and for one token at a time. An "
                        "estimate; <code>twell bench forward</code> measures.",
                        in_.costs_of));
    const auto prompt = per_profile([](const auto& layer) { return layer.prompt.speedup(); });
    const auto decode = per_profile([](const auto& layer) { return layer.decode.speedup(); });
    SvgChart chart(layers_, "layer", {.label = "speed-up", .log = false, .unit = "x"},
                   std::max(highest(prompt), highest(decode)));
    chart.bars({{"prompt", prompt, 0}, {"decode", decode, 1}});
    chart.rule(1.0, "dense");
    out_ += chart.svg();
  }

  void unions() {
    const bool any = std::any_of(in_.profile->layers.begin(), in_.profile->layers.end(),
                                 [](const LayerProfile& layer) { return layer.tiles_64 > 0; });
    if (!any) return;
    section("Union of neighbouring tokens",
            "Share of the neurons that are active on at least one of 64, or 128, tokens in a row: "
            "the weight rows that a tile of tokens has to read.");
    const auto of_64 =
        per_profile([&](const auto& layer) { return percent(layer.mean_union_64()); });
    const auto of_128 =
        per_profile([&](const auto& layer) { return percent(layer.mean_union_128()); });
    SvgChart chart(layers_, "layer", {.label = "union", .log = false, .unit = "%"},
                   std::max(highest(of_64), highest(of_128)));
    chart.bars({{"64 tokens", of_64, 0}, {"128 tokens", of_128, 3}});
    out_ += chart.svg();
  }

  void silent() {
    section("Silent neurons",
            "Share of the neurons that never fire in this text. A longer text wakes some of them; "
            "what stays silent on a million tokens is dead.");
    const auto values = per_profile(
        [&](const auto& layer) { return percent(static_cast<double>(layer.never_fired())); });
    SvgChart chart(layers_, "layer", {.label = "silent neurons", .log = false, .unit = "%"},
                   highest(values));
    chart.bars({{"", values, 1}});
    out_ += chart.svg();
  }

  void positions() {
    section("By position",
            "Mean active neurons per token at a position of its sequence: each layer, and in bold "
            "all layers together.");
    const std::vector<PositionRange> ranges = in_.profile->positions();
    std::vector<std::string> names;
    std::vector<double> means;
    std::vector<std::vector<double>> layers(layers_.size());
    double top = 1.0;
    for (const PositionRange& range : ranges) {
      names.push_back(range_name(range));
      means.push_back(mean_over_layers(range));
      for (size_t i = 0; i < layers.size(); ++i) layers[i].push_back(range.nnz[i]);
      top = std::max(top, highest(range.nnz));
    }
    SvgChart chart(names, "position", {.label = "active neurons", .log = true, .unit = ""}, top);
    for (size_t i = 0; i < layers.size(); ++i) {
      chart.line({"layer " + std::to_string(i), layers[i], 0}, true);
    }
    chart.line({"all layers", means, 0});
    out_ += chart.svg();
  }

  using Rows = std::vector<std::vector<std::string>>;
  void table(const std::vector<Column>& columns, const Rows& rows, const char* style = "") {
    const auto line = [&](char kind, const auto& text_of) {
      out_ += "<tr>";
      for (size_t i = 0; i < columns.size(); ++i) {
        out_ += fmt::format("<t{}{}{}>{}</t{}>", kind, columns[i].left ? " class='text'" : "",
                            kind == 'd' && *style != '\0'
                                ? fmt::format(" title='{}'", html_escape(columns[i].header))
                                : "",
                            html_escape(text_of(i)), kind);
      }
      out_ += "</tr>\n";
    };
    out_ += fmt::format("<table class='{}'>", style);
    line('h', [&](size_t i) { return columns[i].header; });
    for (const std::vector<std::string>& row : rows) line('d', [&](size_t i) { return row[i]; });
    out_ += "</table>\n";
  }

  void token_table(const char* title, const std::vector<TokenRow>& tokens) {
    Rows rows;
    for (const TokenRow& token : tokens) {
      rows.push_back({token.text, std::to_string(token.seen), fmt::format("{:.1f}", token.nnz)});
    }
    table({{.header = title, .left = true}, {.header = "seen"}, {.header = "active neurons"}},
          rows);
  }

  void tokens() {
    section("By token", "Mean active neurons per layer on each occurrence of a token.");
    out_ += "<div class='pair'>\n";
    token_table("most active", in_.most_active);
    token_table("least active", in_.least_active);
    out_ += "</div>\n";
  }

  void layer_table() {
    section("All figures", "Per layer, in neurons unless a share.");
    const LayerTable layers = twell::cli::layer_table(in_);
    table(layers.columns, layers.rows, "figures");
  }

  void damage() {
    out_ += fmt::format("<h2 class='bad'>{} damaged tensors</h2>\n", in_.damaged_tensors);
    Rows rows;
    for (const TensorHealth& tensor : in_.tensors) {
      if (tensor.not_finite > 0) rows.push_back({tensor.name, std::to_string(tensor.not_finite)});
    }
    table({{.header = "tensor", .left = true}, {.header = "not finite"}}, rows);
  }

  const Inspection& in_;
  double ffn_;
  std::vector<std::string> layers_;
  std::string out_;
};

}  // namespace

std::string inspection_html(const Inspection& inspection) {
  return InspectionPage(inspection).html();
}

}  // namespace twell::cli
