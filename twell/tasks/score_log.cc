// SPDX-License-Identifier: Apache-2.0
#include "twell/tasks/score_log.h"

#include <sstream>

#include "twell/base/error.h"
#include "twell/base/file.h"

namespace twell {
namespace fs = std::filesystem;
using nlohmann::ordered_json;
namespace {

void check_subject(const fs::path& path, const ordered_json& found, const ordered_json& expected) {
  for (const auto& [key, value] : expected.items()) {
    TWELL_REQUIRE(found.contains(key) && found[key] == value,
                  "{} holds scores of another {} ({}, now {}): choose another --out, or remove it",
                  path.string(), key, found.contains(key) ? found[key].dump() : "none",
                  value.dump());
  }
}

}  // namespace

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

}  // namespace twell
