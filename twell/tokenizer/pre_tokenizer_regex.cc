// SPDX-License-Identifier: Apache-2.0
#define PCRE2_CODE_UNIT_WIDTH 8
#include "twell/tokenizer/pre_tokenizer_regex.h"

#include <pcre2.h>

#include <new>

#include "twell/base/error.h"

namespace twell {
namespace {

// Limits for hostile patterns; those of ordinary tokenizers need a few steps per byte and one page
// of stack.
constexpr uint32_t kMatchLimit = 100'000'000;
constexpr size_t kJitStackFirst = size_t{32} << 10;
constexpr size_t kJitStackLimit = size_t{4} << 20;

std::string message_of(int error) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(error, text, sizeof(text));
  return reinterpret_cast<const char*>(text);
}

const pcre2_code* as_code(const std::shared_ptr<const void>& code) {
  return static_cast<const pcre2_code*>(code.get());
}

}  // namespace

struct PreTokenizerRegex::Scratch::State {
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(kJitStackFirst, kJitStackLimit, nullptr);

  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
  }
};

PreTokenizerRegex::Scratch::Scratch() : state_(std::make_unique<State>()) {
  if (state_->data == nullptr || state_->context == nullptr) throw std::bad_alloc();
  pcre2_set_match_limit(state_->context, kMatchLimit);
  // PCRE2 without JIT support gives no stack; its interpreter needs none.
  if (state_->stack) pcre2_jit_stack_assign(state_->context, nullptr, state_->stack);
}

PreTokenizerRegex::Scratch::~Scratch() = default;

PreTokenizerRegex::PreTokenizerRegex(std::string_view pattern) {
  const std::string translated = translate_regex(pattern);
  int error = 0;
  size_t offset = 0;
  pcre2_code* code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_NO_AUTO_CAPTURE | PCRE2_NEVER_BACKSLASH_C, &error,
                    &offset, nullptr);
  TWELL_REQUIRE(code != nullptr, "the regular expression does not compile: {}", message_of(error));
  code_ = std::shared_ptr<const void>(
      code, [](const void* p) { pcre2_code_free(static_cast<pcre2_code*>(const_cast<void*>(p))); });
  uint32_t matches_empty = 0;
  pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &matches_empty);
  TWELL_REQUIRE(matches_empty == 0, "the regular expression matches the empty text");
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // when it fails, PCRE2 uses its interpreter
}

bool PreTokenizerRegex::find(std::string_view text, size_t from, Scratch& scratch,
                             Match& match) const {
  Scratch::State& state = *scratch.state_;
  const int result = pcre2_match(as_code(code_), reinterpret_cast<PCRE2_SPTR>(text.data()),
                                 text.size(), from, PCRE2_NO_UTF_CHECK, state.data, state.context);
  if (result == PCRE2_ERROR_NOMATCH) return false;
  TWELL_REQUIRE(result >= 0,
                "the tokenizer's regular expression gave up on a text of {} bytes ({}); use a "
                "pattern that backtracks less",
                text.size(), message_of(result));
  const size_t* span = pcre2_get_ovector_pointer(state.data);
  match = {span[0], span[1]};
  return true;
}

}  // namespace twell
