// The grammars for editors know the verbs of a trace, all of them and no others.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <string>

#include "properties/support/program.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep {
namespace {

using testing_support::read_text;

const std::string kFolder = LOCKSTEP_SOURCE_DIR "/fixtures/editors/";

std::set<std::string> verbs_of_traces() {
  std::set<std::string> verbs{"config", "request", "run", "expect"};
  for (std::size_t i = 0; i < kVerbCount; ++i) verbs.emplace(to_string(static_cast<Verb>(i)));
  return verbs;
}

/// The words between `|`, or vim's `\|`.
std::set<std::string> words_of(const std::string& pattern) {
  const std::regex word("[a-z]+");
  return {std::sregex_token_iterator(pattern.begin(), pattern.end(), word), {}};
}

TEST(Editors, vsCodeKnowsTheVerbs) {
  const auto grammar =
      nlohmann::json::parse(read_text(kFolder + "vscode/syntaxes/lockstep-trace.tmLanguage.json"));
  const std::string verb = grammar["repository"]["verb"]["match"];
  EXPECT_EQ(words_of(verb.substr(0, verb.find(')'))), verbs_of_traces());
  const std::regex pattern(verb);
  EXPECT_TRUE(std::regex_search("admit id=a tokens=a8", pattern));
  EXPECT_FALSE(std::regex_search("admitt id=a", pattern));
  // The files that the package names are there, and they are about the same files.
  const auto package = nlohmann::json::parse(read_text(kFolder + "vscode/package.json"));
  const auto& given = package["contributes"];
  EXPECT_EQ(given["grammars"][0]["scopeName"], grammar["scopeName"]);
  EXPECT_EQ(given["languages"][0]["extensions"][0], ".trace");
  for (const std::string& path : {given["grammars"][0]["path"].get<std::string>(),
                                  given["languages"][0]["configuration"].get<std::string>()})
    EXPECT_FALSE(read_text(kFolder + "vscode/" + path).empty()) << path;
}

TEST(Editors, vimKnowsTheVerbs) {
  const std::string syntax = read_text(kFolder + "vim/syntax/lockstep_trace.vim");
  std::smatch verbs;
  ASSERT_TRUE(std::regex_search(syntax, verbs, std::regex("lockstepVerb \"(.*)\"")));
  EXPECT_EQ(words_of(verbs[1]), verbs_of_traces());
}

}  // namespace
}  // namespace lockstep
