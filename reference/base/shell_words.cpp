#include "reference/base/shell_words.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep {
namespace {

bool needs_no_quotes(unsigned char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
         std::string_view("_-+=:,./@%").find(static_cast<char>(c)) != std::string_view::npos;
}

bool is_control(unsigned char c) {
  return c < 0x20 || c == 0x7F;
}

/// The character as it is written within $'...'.
std::string escaped(unsigned char c) {
  if (c == '\'' || c == '\\') return {'\\', static_cast<char>(c)};
  return is_control(c) ? fmt::format("\\x{:02x}", c) : std::string(1, static_cast<char>(c));
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

class Splitter {
 public:
  Splitter(std::string_view line, std::string_view file) : line_(line), file_(file) {}

  Result<std::vector<std::string>> words() {
    while (at_ < line_.size())
      if (!take()) return fail(fmt::format("a quotation that begins with {} is not closed", open_));
    end_word();
    return std::move(words_);
  }

 private:
  char next() { return line_[at_++]; }

  void add(char c) {
    word_ += c;
    in_word_ = true;
  }
  void end_word() {
    if (in_word_) words_.push_back(std::move(word_));
    word_.clear();
    in_word_ = false;
  }

  /// Takes `%s` if it comes next.
  bool take_file() {
    if (line_.substr(at_, 2) != "%s") return false;
    at_ += 2;
    word_ += file_;
    in_word_ = true;
    return true;
  }

  /// Takes the next character or quotation; false if a quotation is not closed.
  bool take() {
    if (take_file()) return true;
    const char c = next();
    if (c == ' ' || c == '\t') return end_word(), true;
    if (c == '\'') return in_quotes("'", c);
    if (c == '"') return in_quotes("\"", c);
    if (c == '$' && at_ < line_.size() && line_[at_] == '\'') {
      ++at_;
      return in_quotes("$'", '\'');
    }
    if (c != '\\') return add(c), true;
    open_ = "\\";
    if (at_ == line_.size()) return false;
    return add(next()), true;
  }

  bool in_quotes(std::string_view open, char close) {
    open_ = open;
    in_word_ = true;
    while (at_ < line_.size()) {
      if (take_file()) continue;
      const char c = next();
      if (c == close) return true;
      if (c == '\\' && open != "'" && at_ < line_.size())
        take_escape(open);
      else
        add(c);
    }
    return false;
  }

  void take_escape(std::string_view open) {
    const char c = next();
    if (open == "\"") {
      if (std::string_view("\\\"$`").find(c) == std::string_view::npos) add('\\');
      return add(c);
    }
    const bool is_hex = c == 'x' && at_ + 2 <= line_.size() && hex_digit(line_[at_]) >= 0 &&
                        hex_digit(line_[at_ + 1]) >= 0;
    if (is_hex) {
      add(static_cast<char>(hex_digit(line_[at_]) * 16 + hex_digit(line_[at_ + 1])));
      at_ += 2;
      return;
    }
    add(c == 'n' ? '\n' : c == 't' ? '\t' : c == 'r' ? '\r' : c);
  }

  std::string_view line_;
  std::string_view file_;
  std::size_t at_ = 0;
  std::string_view open_;
  std::string word_;
  bool in_word_ = false;
  std::vector<std::string> words_;
};

}  // namespace

std::string shell_quoted(std::string_view word) {
  const bool has_controls = std::ranges::any_of(word, is_control);
  const bool is_plain = !word.empty() && word.find("%s") == std::string_view::npos &&
                        std::ranges::all_of(word, needs_no_quotes);
  if (is_plain) return std::string(word);
  const std::string open = has_controls ? "$'" : "'";
  std::string text = open;
  for (std::size_t i = 0; i < word.size(); ++i) {
    const auto c = static_cast<unsigned char>(word[i]);
    if (has_controls)
      text += escaped(c);
    else
      text += c == '\'' ? "'\\''" : std::string(1, word[i]);
    if (word.substr(i, 2) == "%s") text += "'" + open;
  }
  return text + "'";
}

Result<std::vector<std::string>> split_words(std::string_view line, std::string_view file) {
  return Splitter(line, file).words();
}

}  // namespace lockstep
