// A replay session's own checks, of policies whose answers are given by each test: what an auditor,
// a label or an oracle would say as well is not there to say it.
#include "cache_sim/check/session.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cache_sim/trace/trace.hpp"

namespace lockstep::cache_sim {
namespace {

/// Answers and snapshots of the policies `told` and `told-too`, what they were asked, and what an
/// auditor of theirs finds when it recounts.
struct Told {
  std::string admit;
  std::string alloc = "slot=1";
  Snapshot shown;
  Findings recounted;
  std::vector<std::string> asked;  ///< the lines that a policy was given
};
Told told, told_too;

class ToldPolicy final : public Subject {
 public:
  explicit ToldPolicy(Told& what) : what_(what) {}
  Result<Reply> apply(const Operation& operation) override {
    what_.asked.push_back(operation.text());
    if (operation.verb == Verb::admit) return parse_reply(what_.admit, operation.verb);
    if (operation.verb == Verb::alloc) return parse_reply(what_.alloc, operation.verb);
    return parse_reply(operation.verb == Verb::flush ? "kv=0 state=0" : "ok", operation.verb);
  }
  std::optional<Snapshot> snapshot() const override { return what_.shown; }
  const Told& what() const { return what_; }

 private:
  Told& what_;
};

class ToldAuditor final : public Auditor {
 public:
  explicit ToldAuditor(const Told& what) : what_(what) {}
  void after(const Operation&, const Reply&, Findings&) override {}
  void recompute(Findings& findings) override { findings = what_.recounted; }

 private:
  const Told& what_;
};

std::unique_ptr<Auditor> make_auditor(Subject& subject, const LabelState*) {
  const auto* const policy = dynamic_cast<ToldPolicy*>(&subject);
  return policy == nullptr ? nullptr : std::make_unique<ToldAuditor>(policy->what());
}

template <Told& kWhat>
std::unique_ptr<Subject> make_told(const SubjectOptions&) {
  return std::make_unique<ToldPolicy>(kWhat);
}

/// By the first test that wants them: they are no policies of the project.
void add_policies() {
  if (Registry<PolicyEntry>::find("told") != nullptr) return;
  PolicyEntry policy{.name = "told",
                     .summary = "answers what a test says",
                     .has_states = true,
                     .config_fields = {},
                     .make = make_told<told>,
                     .capabilities = {Capability::tree}};
  Registry<PolicyEntry>::add(policy);
  policy.name = "told-too";
  policy.make = make_told<told_too>;
  Registry<PolicyEntry>::add(policy);
  Registry<AuditorEntry>::add({.name = "told", .make = make_auditor});
}

/// A run of a trace, to its end.
std::unique_ptr<ReplaySession> played(const std::string& text, std::vector<std::string> subjects) {
  const Result<Trace> trace = parse_trace(text, "x.trace");
  EXPECT_TRUE(trace.has_value()) << trace.error().text;
  RunOptions options;
  options.subjects = std::move(subjects);
  auto run = ReplaySession::start(options);
  EXPECT_TRUE(run.has_value()) << run.error().text;
  for (const Statement& statement : trace->statements)
    (*run)->apply(std::get<Operation>(statement.what));
  (*run)->conclude();
  return std::move(*run);
}

/// Kinds of what is found; each test begins with policies that do nothing wrong.
std::vector<FindingKind> found(const std::string& text, std::vector<std::string> subjects) {
  const auto run = played(text, std::move(subjects));
  std::vector<FindingKind> kinds;
  for (const LocatedFinding& one : run->findings()) kinds.push_back(one.finding.kind);
  return kinds;
}

class Session : public testing::Test {
 protected:
  Session() {
    add_policies();
    told.shown = told_too.shown = {
        .nodes = {}, .kv_free = 8, .kv_total = 8, .states_free = 2, .states_total = 2};
    told.admit = told_too.admit = "cached=0 evicted_kv=0 evicted_states=0";
  }
  using Kinds = std::vector<FindingKind>;
};

// A state of another length than what is cached is another prefix's, a shorter one as well.
TEST_F(Session, comparesLabelsWithWhatIsCached) {
  for (const std::string wrong : {"state=3 conv=4", "state=4 conv=3", "state=5 conv=4"}) {
    told.admit = "cached=4 evicted_kv=0 evicted_states=0 " + wrong;
    EXPECT_EQ(found("admit id=r tokens=a9\n", {"told"}), Kinds{FindingKind::wrong_state_prefix});
  }
  told.admit = "cached=4 evicted_kv=0 evicted_states=0 state=4 conv=4";
  EXPECT_EQ(found("admit id=r tokens=a9\n", {"told"}), Kinds{});
}

// Nothing runs and the cache was flushed: what is not free then is lost, and what is free twice is
// counted twice.
TEST_F(Session, everySlotIsFreeAfterAFlush) {
  EXPECT_EQ(found("flush\n", {"told"}), Kinds{});
  for (std::int64_t Snapshot::*const free : {&Snapshot::kv_free, &Snapshot::states_free})
    for (const int off : {-1, 1}) {
      told.shown.*free += off;
      EXPECT_EQ(found("flush\n", {"told"}), Kinds{FindingKind::leak}) << off;
      told.shown.*free -= off;
    }
  told.shown.kv_free = 7;
  EXPECT_EQ(found("admit id=r tokens=a9\nflush\n", {"told"}), Kinds{}) << "somebody runs";
}

// The whole structure is recounted when a run ends, however short it was.
TEST_F(Session, recountsAtItsEnd) {
  told.recounted = {{FindingKind::lock_imbalance, "a lock too many", "1", "2"}};
  const Kinds kinds = found("admit id=r tokens=a9\n", {"told"});
  told.recounted.clear();
  EXPECT_EQ(kinds, Kinds{FindingKind::lock_imbalance});
  EXPECT_EQ(found("admit id=r tokens=a9\n", {"told"}), Kinds{});
}

// A refused admission is no part of the totals: the request comes again.
TEST_F(Session, countsAdmissionsThatWereNotRefused) {
  EXPECT_EQ(played("admit id=r tokens=a9\n", {"told"})->totals(0).input_tokens, 9);
  told.admit = "refused=no_kv";
  EXPECT_EQ(played("admit id=r tokens=a9\n", {"told"})->totals(0).input_tokens, 0);
}

// Policies answer alike in every field, also in one that only one of them has.
TEST_F(Session, policiesAreComparedExactly) {
  EXPECT_EQ(found("admit id=r tokens=a9\n", {"told", "told-too"}), Kinds{});
  told_too.admit = "cached=0 evicted_kv=0 evicted_states=0 junction=0";
  EXPECT_EQ(found("admit id=r tokens=a9\n", {"told", "told-too"}),
            Kinds{FindingKind::reply_differs});
  EXPECT_EQ(found("admit id=r tokens=a9\n", {"told-too", "told"}),
            Kinds{FindingKind::reply_differs});
}

// A slot that has seen tokens when it is taken is one line of a trace, and for a subject two
// operations that it knows.
TEST_F(Session, asksForASlotAndThenAdvancesIt) {
  using Lines = std::vector<std::string>;
  const std::string trace = "alloc as=s tokens=a3\n";
  told.asked.clear();
  EXPECT_EQ(found(trace, {"told"}), Kinds{});
  EXPECT_EQ(std::exchange(told.asked, {}), (Lines{"alloc as=s", "advance slot=s tokens=a3"}));
  told.alloc = "refused=no_state_slot";
  EXPECT_EQ(found(trace, {"told"}), Kinds{});
  EXPECT_EQ(told.asked, Lines{"alloc as=s"}) << "there is no slot to advance";
  EXPECT_EQ(found(trace, {"told", "told-too"}), Kinds{FindingKind::reply_differs});
}

}  // namespace
}  // namespace lockstep::cache_sim
