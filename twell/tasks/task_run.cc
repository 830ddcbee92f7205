// SPDX-License-Identifier: Apache-2.0
#include "twell/tasks/task_run.h"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/tasks/choice_scores.h"

namespace twell {
namespace fs = std::filesystem;
using nlohmann::ordered_json;
namespace {

using Clock = std::chrono::steady_clock;
using Groups = std::vector<ChoiceGroup>;  // groups of one item

constexpr int64_t kPlannedSequences = 256;  // per batch; a batch with more allocates when it runs

int64_t longest(const Groups& groups) {
  int64_t tokens = 0;
  for (const ChoiceGroup& group : groups) tokens = std::max(tokens, group.tokens());
  return tokens;
}

int64_t fed_tokens(const Groups& groups) {
  int64_t tokens = 0;
  for (const ChoiceGroup& group : groups) {
    tokens += std::ssize(group.context);
    for (const auto& continuation : group.continuations) tokens += std::ssize(continuation) - 1;
  }
  return tokens;
}

// Fills batches with items from the longest to the shortest. A batch counts every sequence as long
// as its longest because the KV cache allocates that much for each.
std::vector<std::vector<size_t>> plan_batches(const std::vector<Groups>& items,
                                              int64_t batch_tokens) {
  std::vector<size_t> order(items.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return longest(items[a]) > longest(items[b]); });
  std::vector<std::vector<size_t>> batches;
  int64_t length = 0, sequences = 0;
  for (const size_t item : order) {
    const int64_t more = std::ssize(items[item]);
    if (batches.empty() || (sequences + more) * length > batch_tokens) {
      batches.emplace_back();
      length = longest(items[item]);
      sequences = 0;
    }
    batches.back().push_back(item);
    sequences += more;
  }
  return batches;
}

// The log of scores, as JSON lines: the subject, which says what was scored, and a line per item.
// It is written atomically, so that a killed evaluation can be continued from it.
using ItemScores = std::vector<std::optional<ItemScore>>;  // nullopt: not scored yet

void check_subject(const fs::path& path, const ordered_json& found, const ordered_json& expected) {
  for (const auto& [key, value] : expected.items()) {
    TWELL_REQUIRE(found.contains(key) && found[key] == value,
                  "{} holds scores of another {} ({}, now {}): choose another --out, or remove it",
                  path.string(), key, found.contains(key) ? found[key].dump() : "none",
                  value.dump());
  }
}

void write_score_log(const fs::path& path, const ordered_json& subject,
                     const std::vector<TaskItem>& items, const ItemScores& scores) {
  std::string text = subject.dump() + "\n";
  for (size_t i = 0; i < items.size(); ++i) {
    if (!scores[i]) continue;
    const ordered_json line = {{"item", i},
                               {"line", items[i].line},
                               {"log_likelihoods", scores[i]->log_likelihoods},
                               {"gold", items[i].gold},
                               {"correct", scores[i]->correct},
                               {"correct_norm", scores[i]->correct_norm}};
    text += line.dump() + "\n";
  }
  write_file_atomic(path, text);
}

ItemScores read_score_log(const fs::path& path, const ordered_json& subject,
                          const std::vector<TaskItem>& items) {
  ItemScores scores(items.size());
  if (!fs::exists(path)) return scores;
  std::istringstream text(read_file(path));
  std::string line;
  try {
    std::getline(text, line);
    check_subject(path, ordered_json::parse(line), subject);
    while (std::getline(text, line)) {
      const ordered_json row = ordered_json::parse(line);
      const size_t i = row.at("item").get<size_t>();
      auto values = row.at("log_likelihoods").get<std::vector<double>>();
      TWELL_REQUIRE(i < items.size() && values.size() == items[i].choices.size(),
                    "{}: item {} is not one of this task; remove the file", path.string(), i);
      scores[i] = score_item(items[i], std::move(values));
    }
  } catch (const nlohmann::json::exception&) {
    throw InputError(fmt::format("{} is damaged or not a file of scores; remove it to start again",
                                 path.string()));
  }
  return scores;
}

}  // namespace

struct TaskRunner::Work {
  const TaskData& data;
  std::vector<Groups> items;
  ItemScores scores;
  TaskProgress progress;

  bool done(const std::vector<size_t>& batch) const {
    return std::all_of(batch.begin(), batch.end(),
                       [&](size_t item) { return scores[item].has_value(); });
  }
};

TaskRunner::TaskRunner(Scorer& scorer, const Tokenizer& tokenizer, const TaskRunOptions& options)
    : scorer_(scorer),
      tokenizer_(tokenizer),
      options_(options),
      encoder_(tokenizer, scorer.config(), options.begin_token) {
  if (options_.batch_tokens == 0) options_.batch_tokens = scorer.good_batch();
  TWELL_REQUIRE(options_.batch_tokens >= 1, "the batch must be at least one token, got {}",
                options_.batch_tokens);
  if (options_.out.empty()) return;
  make_folder(options_.out);
  model_hash_ = scorer.weights_hash();
}

ScorerPlan TaskRunner::plan(const ModelConfig& config, const TaskRunOptions& options) {
  const int64_t batch = options.batch_tokens == 0 ? kGpuBatchTokens : options.batch_tokens;
  const int64_t tokens = std::max(batch, config.context);
  return {.tokens = tokens,
          .sequences = kPlannedSequences,
          .length = config.context,
          .cache_tokens = tokens};
}

std::optional<TaskAccuracy> TaskRunner::run(const Task& task, const TaskData& data) {
  Work work{.data = data, .items = {}, .scores = ItemScores(data.items.size()), .progress = {}};
  for (const TaskItem& item : data.items) {
    work.items.push_back(
        encoder_.encode(item, fmt::format("{} line {}", data.file.string(), item.line)));
    work.progress.tokens += fed_tokens(work.items.back());
  }
  const ordered_json subject = {{"task", task.name},
                                {"checkpoint", model_hash_},
                                {"tokenizer", tokenizer_.hash()},
                                {"items", data.hash},
                                {"bos", options_.begin_token && tokenizer_.bos_token() >= 0},
                                {"ffn", ffn_policy_name(scorer_.policy())},
                                {"batch_tokens", options_.batch_tokens}};
  const fs::path log = options_.out / (std::string(task.name) + ".jsonl");
  const auto save = [&] {
    if (!options_.out.empty()) write_score_log(log, subject, data.items, work.scores);
  };
  if (!options_.out.empty()) work.scores = read_score_log(log, subject, data.items);

  TaskProgress& progress = work.progress;
  progress.task = &task;
  progress.items = std::ssize(data.items);
  for (size_t i = 0; i < work.items.size(); ++i) {
    if (!work.scores[i]) continue;
    ++progress.items_done;
    progress.tokens_done += fed_tokens(work.items[i]);
  }
  progress.tokens_found = progress.tokens_done;

  Clock::time_point saved = Clock::now();
  for (const std::vector<size_t>& batch : plan_batches(work.items, options_.batch_tokens)) {
    // Batches that decide how later ones run, run even if their scores exist.
    const bool done = work.done(batch);
    if (done && batches_ >= scorer_.deciding_batches()) continue;
    run_batch(work, batch);
    ++batches_;
    if (done) continue;
    if (options_.on_progress) options_.on_progress(progress);
    const bool cancelled = options_.cancel != nullptr && options_.cancel->load();
    if (cancelled ||
        std::chrono::duration<double>(Clock::now() - saved).count() >= options_.save_seconds) {
      save();
      saved = Clock::now();
    }
    if (cancelled && progress.items_done < progress.items) return std::nullopt;
  }
  save();
  std::vector<ItemScore> scores;
  for (std::optional<ItemScore>& score : work.scores) scores.push_back(std::move(*score));
  return task_accuracy(task, scores);
}

void TaskRunner::run_batch(Work& work, const std::vector<size_t>& batch) {
  Groups groups;
  for (const size_t item : batch) {
    groups.insert(groups.end(), work.items[item].begin(), work.items[item].end());
  }
  const std::vector<std::vector<double>> scores = continuation_scores(scorer_, groups);
  size_t next = 0;
  for (const size_t item : batch) {
    std::vector<double> log_likelihoods(work.data.items[item].choices.size());
    for (const ChoiceGroup& group : work.items[item]) {
      for (size_t i = 0; i < group.choices.size(); ++i) {
        const double score = scores[next][i];
        TWELL_REQUIRE(score == score,
                      "the model gives a probability that is not a number: its weights are damaged "
                      "(twell inspect finds them)");
        log_likelihoods[static_cast<size_t>(group.choices[i])] = score;
      }
      ++next;
    }
    if (!work.scores[item]) {
      ++work.progress.items_done;
      work.progress.tokens_done += fed_tokens(work.items[item]);
    }
    work.scores[item] = score_item(work.data.items[item], std::move(log_likelihoods));
  }
}

}  // namespace twell
