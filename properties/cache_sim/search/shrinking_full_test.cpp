// Our shrinker beside RapidCheck's, on the same findings: how often each plays a trace, how long it
// takes, and how many lines are left.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "cache_sim/search/operation_player.hpp"
#include "properties/support/search.hpp"

namespace lockstep::cache_sim {
namespace {

struct Cost {
  std::int64_t executions = 0;
  double cpu_s = 0;
  std::size_t lines = 0;
};

Cost measured(const std::function<void(Cost&)>& work) {
  Cost cost;
  const std::clock_t begin = std::clock();
  work(cost);
  cost.cpu_s = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  return cost;
}

/// A finding of single operations, as it was found.
struct Found {
  std::string defect;
  RunOptions run;
  Discovery discovery;
};

Found finding_of(const std::string& defect) {
  Found found{.defect = defect, .run = {}, .discovery = {}};
  for (std::uint64_t seed = 1;; ++seed) {
    ExploreOptions options;
    options.run = testing_support::run_with_defect(defect);  // not what an earlier seed drew
    options.seed = seed;
    options.traces = 5000;
    options.shrinks = false;
    Result<ExploreOutcome> outcome = explore(options);
    require(outcome && outcome->discoveries.size() == 1, "every defect is found");
    found.discovery = std::move(outcome->discoveries.front());
    found.run = options.run;
    found.run.config = found.discovery.trace.config;
    if (!found.discovery.trace.scheduler_level) return found;
  }
}

Cost by_us(const Found& found) {
  return measured([&](Cost& cost) {
    const Result<ShrinkOutcome> shrunk = shrink(found.discovery.trace, found.run);
    require(shrunk.has_value(), "a finding can be shrunk");
    cost.executions = shrunk->executions;
    cost.lines = line_count(shrunk->trace);
  });
}

// --- RapidCheck ----------------------------------------------------------------------------------

/// RapidCheck's smaller forms of one line: fewer tokens, a smaller number.
rc::Seq<Step> smaller(const Step& step) {
  const auto& operation = std::get<Operation>(step.statement.what);
  const auto with = [step](auto change) {
    return [step, change](auto value) {
      Step other = step;
      change(std::get<Operation>(other.statement.what), value);
      return other;
    };
  };
  return rc::seq::concat(
      rc::seq::map(
          rc::shrink::towards<std::uint32_t>(operation.tokens.size(), 0),
          with([](Operation& o, std::uint32_t size) { o.tokens = o.tokens.prefix(size); })),
      rc::seq::map(rc::shrink::towards<std::int64_t>(operation.n, Operation::kAbsent),
                   with([](Operation& o, std::int64_t n) { o.n = n; })),
      rc::seq::map(rc::shrink::towards<std::int64_t>(step.rest, Step::kLiteral),
                   [step](std::int64_t rest) {
                     Step other = step;
                     other.rest = rest;
                     return other;
                   }),
      rc::seq::map(rc::shrink::towards<std::int64_t>(operation.kv, Operation::kAbsent),
                   with([](Operation& o, std::int64_t kv) { o.kv = kv; })),
      rc::seq::map(rc::shrink::towards<std::int64_t>(operation.state, Operation::kAbsent),
                   with([](Operation& o, std::int64_t state) { o.state = state; })));
}

bool shows(const Found& found, const Steps& steps) {
  RunOptions options = found.run;
  options.skip_illegal = true;
  const Result<std::unique_ptr<ReplaySession>> run = ReplaySession::start(options);
  require(run.has_value(), "a finding's config is one");
  OperationPlayer player(**run);
  for (const Step& step : steps)
    if (!(*run)->stopped()) player.play(step);
  (*run)->conclude();
  return !(*run)->findings().empty() &&
         (*run)->findings().front().finding.kind == found.discovery.finding.finding.kind;
}

/// The trace as it is played, its lines knowing what they mean (an insert that its tokens are those
/// of its slot), so that neither shrinker may make it lie.
Steps played_steps(const Found& found) {
  RunOptions options = found.run;
  options.skip_illegal = true;
  const Result<std::unique_ptr<ReplaySession>> run = ReplaySession::start(options);
  require(run.has_value(), "a finding's config is one");
  OperationPlayer player(**run);
  for (const Step& step : literal_steps(found.discovery.trace.statements))
    if (!(*run)->stopped()) player.play(step);
  return std::move(player.played());
}

/// Its shrinker for containers of values: chunks removed, then each element shrunk, from the same
/// trace on, played in the same way.
Cost by_rapidcheck(const Found& found) {
  const rc::Gen<Steps> the_trace([&](const rc::Random&, int) {
    return rc::shrinkable::shrinkRecur(played_steps(found), [](const Steps& steps) {
      return rc::seq::concat(rc::shrink::removeChunks(steps),
                             rc::shrink::eachElement(steps, smaller));
    });
  });
  return measured([&](Cost& cost) {
    rc::check([&] {
      const Steps steps = *the_trace;
      ++cost.executions;
      if (!shows(found, steps)) return;
      cost.lines = steps.size();
      RC_FAIL("the finding");
    });
  });
}

// -------------------------------------------------------------------------------------------------

// Ten findings, one of each kind of rule. The table is what reports/shrinking.md shows.
TEST(Shrinking, takesFewerExecutionsThanRapidChecksAndLeavesNoMore) {
  const std::vector<std::string> defects = {"sglang-no-buffer:split-moves-state",
                                            "sglang-no-buffer:split-forgets-lock",
                                            "sglang-no-buffer:tombstone-lock-uncounted",
                                            "sglang-no-buffer:drop-keeps-size",
                                            "sglang-no-buffer:leaks-refused-slot",
                                            "sglang-no-buffer:match-keeps-place",
                                            "radix:match-forgets-time",
                                            "sglang-extra-buffer:frees-kept-slot",
                                            "sglang-extra-buffer:absolute-grid",
                                            "sglang-legacy:match-renews-one-state"};
  std::string table =
      "| defect | lines found | ours: executions | s | lines | RapidCheck: executions | s | lines "
      "|\n"
      "|---|---|---|---|---|---|---|---|\n";
  Cost ours_in_all;
  Cost theirs_in_all;
  for (const std::string& defect : defects) {
    const Found found = finding_of(defect);
    const Cost ours = by_us(found);
    const Cost theirs = by_rapidcheck(found);
    table += fmt::format("| {} | {} | {} | {:.3f} | {} | {} | {:.3f} | {} |\n", defect,
                         found.discovery.lines_before, ours.executions, ours.cpu_s, ours.lines,
                         theirs.executions, theirs.cpu_s, theirs.lines);
    ours_in_all.executions += ours.executions;
    ours_in_all.lines += ours.lines;
    theirs_in_all.executions += theirs.executions;
    theirs_in_all.lines += theirs.lines;
  }
  fmt::print("{}", table);
  EXPECT_LT(ours_in_all.executions, theirs_in_all.executions);
  EXPECT_LE(ours_in_all.lines, theirs_in_all.lines);
}

}  // namespace
}  // namespace lockstep::cache_sim
