// Laws of the cases of every operation that can be judged: each tells what it is there for.
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <regex>
#include <set>

#include "kernels/judge/operation.hpp"
#include "kernels/judge/verdict.hpp"

namespace lockstep::judging {
namespace {

/// The cases of an operation that are small, in its own types.
std::vector<Case> small_cases(const JudgedKernel& operation) {
  CaseOptions options;
  if (operation.default_types == "float32/float32") options.activations = ElementType::float32;
  std::vector<Case> cases;
  for (const CasePlan& plan : operation.plans())
    if (!plan.timed && !plan.large) cases.push_back(plan.make(options));
  return cases;
}

/// Whether in some case what `change` makes of its definition differs beyond the yardstick.
/// `meaningless`: what it says of a case for which the change breaks a rule.
template <class Change>
bool shows_in_some_case(const JudgedKernel& operation, const std::vector<Case>& cases,
                        bool meaningless, Change change) {
  return std::ranges::any_of(cases, [&](const Case& c) {
    try {
      const std::optional<Answer> changed = change(c);
      return changed && !agrees(operation, c, *changed, "");
    } catch (const ContractViolation&) {
      return meaningless;
    }
  });
}

Case without(Case c, const std::string& name) {
  std::erase_if(c.tensors, [&](const Tensor& one) { return one.name == name; });
  std::erase_if(c.scalars, [&](const Scalar& one) { return one.name == name; });
  return c;
}

// A mistake whose id is misspelt where it is declared or where it is made would never be named: its
// definition is the right one.
TEST(JudgedOperations, everyMistakeChangesSomeCase) {
  // Freed tensors are asked for again: giving their memory back takes a third of the test.
  mallopt(M_MMAP_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  for (const JudgedKernel* const operation : judged_kernels()) {
    const std::vector<Case> cases = small_cases(*operation);
    for (const Mistake& mistake : operation->mistakes)
      EXPECT_TRUE(shows_in_some_case(
          *operation, cases, false, [&](const Case& c) { return operation->truth(c, mistake.id); }))
          << operation->name << ": " << mistake.id;
  }
}

/// Ids that a file compares a mistake with and that are not among those.
std::vector<std::string> undeclared(const std::filesystem::path& path,
                                    const std::set<std::string>& declared) {
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  static const std::regex kComparison(R"re(mistake_?\s*[!=]=\s*"([^"]*)")re");
  std::vector<std::string> unknown;
  for (std::sregex_iterator one(text.begin(), text.end(), kComparison), end; one != end; ++one)
    if (!declared.contains((*one)[1])) unknown.push_back((*one)[1]);
  return unknown;
}

// A comparison with an id that no operation declares is never true: its branch is dead. With the
// test above, an id that is misspelt in either place is seen.
TEST(JudgedOperations, everyIdThatIsComparedIsDeclared) {
  const std::filesystem::path folder = std::filesystem::path(LOCKSTEP_SOURCE_DIR) / "kernels/judge";
  std::set<std::string> all;
  for (const JudgedKernel* const operation : judged_kernels())
    for (const Mistake& mistake : operation->mistakes) all.emplace(mistake.id);
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.is_directory()) continue;
    ++files;
    for (const std::string& id : undeclared(entry.path(), all))
      ADD_FAILURE() << entry.path().filename() << " compares a mistake with `" << id << "`";
  }
  EXPECT_GT(files, 10U);
}

// A kernel that forgets a limit, a flag or an optional argument is told from a right one.
TEST(JudgedOperations, everyArgumentChangesSomeCase) {
  for (const JudgedKernel* const operation : judged_kernels()) {
    const std::vector<Case> cases = small_cases(*operation);
    const auto& positional = operation->positional;
    std::set<std::string> names;
    for (const Case& c : cases) {
      for (const Tensor& one : c.tensors)
        if (one.role == Role::input) names.insert(one.name);
      for (const Scalar& one : c.scalars) names.insert(one.name);
    }
    names.erase("boundary_every");   // boundary_states do not go without it
    names.erase("query_start_loc");  // every token were a row, and lists have a place for each row
    for (const std::string& name : names) {
      if (std::ranges::find(positional, name) != positional.end()) continue;
      EXPECT_TRUE(shows_in_some_case(*operation, cases, true,
                                     [&](const Case& c) -> std::optional<Answer> {
                                       const Case fewer = without(c, name);
                                       if (fewer.tensors.size() == c.tensors.size() &&
                                           fewer.scalars.size() == c.scalars.size())
                                         return {};
                                       return operation->truth(fewer, "");
                                     }))
          << operation->name << ": " << name;
    }
  }
}

}  // namespace
}  // namespace lockstep::judging
