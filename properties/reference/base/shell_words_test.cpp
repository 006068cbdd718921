// Words of printed commands and of `# run:` lines: what is quoted is split into the same words, by
// us and by a shell.
#include "reference/base/shell_words.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <array>
#include <cstdio>
#include <string>
#include <vector>

namespace lockstep {
namespace {

using Words = std::vector<std::string>;

/// Words of characters that mean something to a shell, and of any others.
rc::Gen<std::string> any_word() {
  return rc::gen::container<std::string>(rc::gen::oneOf(
      rc::gen::elementOf(std::string("'\"\\$%s `#~*\n\t!ab=")), rc::gen::nonZero<char>()));
}

std::string printed_by(const std::string& shell, const std::string& word) {
  const std::string command = fmt::format("printf '%s' {}", shell_quoted(word));
  const std::string line = fmt::format("{} -c {}", shell, shell_quoted(command));
  std::string text;
  std::FILE* const output = ::popen(line.c_str(), "r");
  std::array<char, 256> buffer;
  for (std::size_t size = 0; (size = std::fread(buffer.data(), 1, buffer.size(), output)) != 0;)
    text.append(buffer.data(), size);
  ::pclose(output);
  return text;
}

// A finding about a child with arguments is written with a command that finds it again.
RC_GTEST_PROP(ShellWords, areSplitAsTheyWereQuoted, ()) {
  const Words words = *rc::gen::container<Words>(any_word());
  std::string line;
  for (const std::string& word : words) line += shell_quoted(word) + " ";
  RC_ASSERT(line.find('\n') == std::string::npos);
  const Result<Words> again = split_words(line, "file.trace");
  RC_ASSERT(again.has_value());
  RC_ASSERT(*again == words);
}

TEST(ShellWords, areThoseOfAShell) {
  for (const std::string word :
       {"plain", "two words", "it's", "$HOME `id` \\n", "", "a\"b", "%s", "100%%sure", "*", "~"})
    EXPECT_EQ(printed_by("sh", word), word);
}

TEST(ShellWords, nameTheFileWherePercentSStands) {
  const Result<Words> words =
      split_words(R"(replay %s --log=%s.log '%s x' "%""s" \%s a\ b "q\"\x")", "a b.trace");
  ASSERT_TRUE(words.has_value());
  EXPECT_EQ(*words, (Words{"replay", "a b.trace", "--log=a b.trace.log", "a b.trace x", "%s", "%s",
                           "a b", "q\"\\x"}));
}

TEST(ShellWords, refuseAQuotationThatIsNotClosed) {
  for (const char* const line : {"a 'b", "a \"b", "a $'b\\'", "a\\"})
    EXPECT_FALSE(split_words(line).has_value()) << line;
}

}  // namespace
}  // namespace lockstep
