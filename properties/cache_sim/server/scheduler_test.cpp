// The scheduler alone, its subject's answers made by hand: first each rule of the page
// schedulers.md, "The scheduler", then any requests against a subject that refuses as it likes. All
// of it is held to the scheduler's oracle, reference/caches/scheduler_oracle.hpp.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cache_sim/server/scheduler.hpp"
#include "properties/cache_sim/server/scheduler_server.hpp"
#include "reference/base/philox.hpp"
#include "reference/base/require.hpp"
#include "reference/caches/scheduler_oracle.hpp"

namespace lockstep::cache_sim {
namespace {

// --- Each rule, without overlap ------------------------------------------------------------------

TEST(Scheduler, aRequestIsAdmittedComputedCheckpointedDecodedAndFinished) {
  Server server({.chunked_prefill = 8});
  const RequestNumber r = server.arrive("r", 5, 3);
  EXPECT_EQ(server.step(), "admit:r extend:r:5 step:r |checkpoint:r");
  EXPECT_EQ(server.news(), "r admitted, r has 1");
  EXPECT_EQ(server.step(), "extend:r:1 step:r |");
  EXPECT_EQ(server.step(), "extend:r:1 step:r |finish:r");
  EXPECT_EQ(server.news(), "r has 2, r has 3, r ends: length");
  EXPECT_TRUE(server.ended(r));
  EXPECT_FALSE(server.has_work());
  EXPECT_EQ(server.step(), "");
  EXPECT_TRUE(server.idle);
}

// The one token of an output of 1 is sampled by the prefill itself.
TEST(Scheduler, anOutputOfOneNeverDecodes) {
  Server server({.chunked_prefill = 4});
  server.arrive("r", 5, 1);
  EXPECT_EQ(server.step(), "admit:r extend:r:4 step:r |checkpoint:r");
  EXPECT_EQ(server.step(), "extend:r:1 step:r |finish:r");
  EXPECT_FALSE(server.has_work());
}

TEST(Scheduler, anOutputGivenAsTokensStopsByItself) {
  Server server({});
  RequestSpec spec = spec_of("r", 2, 1);
  spec.stops = true;
  server.arrive(spec);
  server.step();
  EXPECT_EQ(server.news(), "r admitted, r has 1, r ends: stop");
}

TEST(Scheduler, cachedTokensAreNotComputed) {
  Server server({.chunked_prefill = 8});
  server.answer = [](const Operation& asked) {
    return asked.verb == Verb::admit ? Reply{}.set(ReplyField::cached, 9) : Reply{};
  };
  server.arrive("r", 10, 2);
  EXPECT_EQ(server.step(), "admit:r extend:r:1 step:r |checkpoint:r");
  EXPECT_EQ(server.forward->prefill_tokens, 1);
  EXPECT_EQ(server.forward->context_tokens, 9);
  EXPECT_EQ(server.forward->decode_tokens, 0);
}

TEST(Scheduler, promptsShareAChunkInOrderAndNoRequestDecodesBesideThem) {
  Server server({.chunked_prefill = 10});
  server.arrive("a", 3, 9);
  server.step();
  server.arrive("b", 12, 2);
  server.arrive("c", 5, 2);
  server.arrive("d", 4, 2);
  EXPECT_EQ(server.step(), "admit:b extend:b:10 step:b |checkpoint:b");
  EXPECT_EQ(server.step(),
            "extend:b:2 admit:c extend:c:5 admit:d extend:d:3 step:b:c:d "
            "|checkpoint:b checkpoint:c checkpoint:d");
  EXPECT_EQ(server.step(), "extend:d:1 step:d |checkpoint:d");
  EXPECT_EQ(server.step(),
            "extend:a:1 extend:b:1 extend:c:1 extend:d:1 step:a:b:c:d |finish:b finish:c finish:d");
  EXPECT_EQ(server.forward->decode_tokens, 4);
  EXPECT_EQ(server.forward->prefill_tokens, 0);
  EXPECT_EQ(server.forward->context_tokens, 4 - 1 + 12 + 5 + 4);
}

TEST(Scheduler, noMoreRequestsRunThanMaxRunning) {
  Server server({.chunked_prefill = 100, .max_running = 2});
  for (const char* const id : {"a", "b", "c"}) server.arrive(id, 2, 2);
  EXPECT_EQ(server.step(),
            "admit:a extend:a:2 admit:b extend:b:2 step:a:b |checkpoint:a checkpoint:b");
  EXPECT_EQ(server.step(), "extend:a:1 extend:b:1 step:a:b |finish:a finish:b");
  EXPECT_EQ(server.step(), "admit:c extend:c:2 step:c |checkpoint:c");
}

TEST(Scheduler, higherPrioritiesGoFirstAndEqualOnesInOrderOfArrival) {
  Server server({.max_running = 1});
  const auto arrive = [&](const char* id, std::int64_t priority) {
    RequestSpec spec = spec_of(id, 1, 1);
    spec.priority = priority;
    server.arrive(spec);
  };
  arrive("a", 0);
  arrive("b", 5);
  arrive("c", -5);
  arrive("d", 5);
  arrive("e", 0);
  std::string order;
  while (server.has_work()) order += server.step().substr(6, 1);
  EXPECT_EQ(order, "bdaec");
}

// The last admitted gives way, keeps its outputs and is the first to come back.
TEST(Scheduler, withoutKvTheLastAdmittedRequestIsRetractedAndResumesWithItsOutputs) {
  Server server({.chunked_prefill = 8});
  server.arrive("a", 2, 5);
  server.arrive("b", 3, 4);
  server.step();
  server.step();  // both have 2 outputs
  server.arrive("c", 1, 1);
  server.news();
  int refusals = 0;
  Operation resumed;
  server.answer = [&](const Operation& asked) {
    if (asked.verb == Verb::admit && asked.id.text() == "b") resumed = asked;
    if (asked.verb == Verb::admit && asked.id.text() == "c" && refusals == 0)
      return Reply::refusal(Refusal::no_kv);
    if (asked.verb == Verb::extend && asked.id.text() == "a" && refusals == 0) {
      ++refusals;
      return Reply::refusal(Refusal::no_kv);
    }
    return Reply{};
  };
  EXPECT_EQ(server.step(), "admit:c extend:a:1 preempt:b extend:a:1 step:a |");
  EXPECT_EQ(server.news(), "b retracted, a has 3");
  EXPECT_EQ(server.step(), "admit:b extend:b:5 admit:c extend:c:1 step:b:c |checkpoint:b finish:c");
  EXPECT_EQ(resumed.tokens, spec_of("b", 3, 4).tokens.prefix(5)) << "outputs are known tokens now";
  EXPECT_EQ(resumed.prompt, 3);
  EXPECT_EQ(server.news(), "b admitted, c admitted, b has 3, c has 1, c ends: length");
  EXPECT_EQ(server.step(), "extend:a:1 extend:b:1 step:a:b |finish:b");
}

TEST(Scheduler, aRefusedFirstChunkSendsItsOwnRequestBack) {
  Server server({.chunked_prefill = 8});
  server.arrive("a", 2, 3);
  server.step();
  server.arrive("b", 3, 1);
  server.arrive("c", 1, 1);
  bool refuse = true;
  server.answer = [&](const Operation& asked) {
    return refuse && asked.verb == Verb::extend && asked.id.text() == "b"
               ? Reply::refusal(Refusal::no_kv)
               : Reply{};
  };
  EXPECT_EQ(server.step(), "admit:b extend:b:3 preempt:b extend:a:1 step:a |")
      << "nobody is admitted past it, and those who run go on";
  refuse = false;
  EXPECT_EQ(server.step(), "admit:b extend:b:3 admit:c extend:c:1 step:b:c |finish:b finish:c");
}

// Admitted again at once it would compute its first chunk again, and nobody else would ever decode.
TEST(Scheduler, aRefusedLaterChunkLetsTheOthersDecodeFirst) {
  Server server({.chunked_prefill = 2});
  server.arrive("a", 2, 3);
  server.step();
  server.arrive("b", 4, 1);
  EXPECT_EQ(server.step(), "admit:b extend:b:2 step:b |checkpoint:b");
  server.answer = [](const Operation& asked) {
    return asked.verb == Verb::extend && asked.id.text() == "b" ? Reply::refusal(Refusal::no_kv)
                                                                : Reply{};
  };
  EXPECT_EQ(server.step(), "extend:b:2 preempt:b extend:a:1 step:a |");
}

TEST(Scheduler, loneRequestTooLargeIsRefusedAtOnce) {
  for (const Verb refused : {Verb::admit, Verb::extend}) {
    Server server({});
    const RequestNumber r = server.arrive("r", 5, 3);
    server.arrive("next", 1, 1);
    server.answer = [&](const Operation& asked) {
      return asked.verb == refused && asked.id.text() == "r" ? Reply::refusal(Refusal::no_kv)
                                                             : Reply{};
    };
    const std::string said = server.step();
    EXPECT_TRUE(server.ended(r)) << said;
    EXPECT_NE(server.news().find("r ends: refused"), std::string::npos);
    EXPECT_EQ(said.find("abort:r") != std::string::npos, refused == Verb::extend) << said;
    while (server.has_work()) server.step();
    EXPECT_EQ(server.news().find("next ends: refused"), std::string::npos);
  }
}

TEST(Scheduler, aTooLongRequestIsRefusedAtOnceAndTheNextIsAdmitted) {
  Server server({});
  server.arrive("a", 1, 4);
  server.step();
  server.arrive("giant", 500, 1);
  server.arrive("b", 1, 4);
  server.news();
  server.answer = [](const Operation& asked) {
    return asked.id.text() == "giant" ? Reply::refusal(Refusal::too_long) : Reply{};
  };
  EXPECT_EQ(server.step(), "admit:giant admit:b extend:b:1 step:b |checkpoint:b");
  EXPECT_EQ(server.news(), "giant ends: refused, b admitted, b has 1");
}

// A refused admission ends admission for this step and nothing else.
TEST(Scheduler, noRequestOvertakesARefusedAdmission) {
  Server server({});
  server.arrive("a", 1, 9);
  server.step();
  server.arrive("b", 5, 1);
  server.arrive("c", 1, 1);
  server.answer = [](const Operation& asked) {
    return asked.id.text() == "b" ? Reply::refusal(Refusal::no_state_slot) : Reply{};
  };
  EXPECT_EQ(server.step(), "admit:b extend:a:1 step:a |");
  EXPECT_EQ(server.step(), "admit:b extend:a:1 step:a |");
}

TEST(Scheduler, abortLeavesTheQueueOrTheSubject) {
  Server server({.max_running = 1});
  const RequestNumber a = server.arrive("a", 1, 9), b = server.arrive("b", 1, 9);
  server.step();
  server.news();
  EXPECT_EQ(server.abort(b), "") << "the subject has never heard of it";
  EXPECT_EQ(server.abort(a), "abort:a");
  EXPECT_EQ(server.news(), "b ends: abort, a ends: abort");
  EXPECT_EQ(server.abort(a), "") << "it has ended";
  EXPECT_EQ(server.news(), "");
  EXPECT_FALSE(server.has_work());
}

TEST(Scheduler, onlyRunningRequestsAreRetractedOnDemand) {
  Server server({});
  const RequestNumber a = server.arrive("a", 3, 9);
  EXPECT_EQ(server.retract(a), "") << "it waits";
  server.step();
  EXPECT_EQ(server.retract(a), "preempt:a");
  EXPECT_EQ(server.step(), "admit:a extend:a:4 step:a |checkpoint:a");
  EXPECT_EQ(server.news(), "a admitted, a has 1, a retracted, a admitted, a has 2");
}

TEST(Scheduler, aVerificationKeepsTheAcceptedDrafts) {
  Server server({});
  RequestSpec spec = spec_of("r", 4, 7);
  spec.drafts = {3, 0, 2, 9};
  spec.accept = {2, 1, 3, 5};
  server.arrive(spec);
  std::vector<Operation> asked;
  server.answer = [&](const Operation& operation) {
    asked.push_back(operation);
    return Reply{};
  };
  server.step();
  EXPECT_EQ(server.step(), "extend:r:4 step:r |accept:r:2");
  const Tokens output = Tokens::of_document(2, 0, 7);
  const Operation verify = asked[asked.size() - 3], accept = asked.back();
  EXPECT_EQ(verify.tokens, output.slice(0, 1)) << "the last sampled token";
  EXPECT_EQ(verify.drafts.size(), 3u);
  EXPECT_EQ(verify.drafts.prefix(1), output.slice(1, 2)) << "the draft that is kept is right";
  EXPECT_NE(verify.drafts[1], output[2]) << "and the next one is wrong";
  EXPECT_EQ(accept.tokens, output.slice(1, 3));
  EXPECT_EQ(server.step(), "extend:r:1 step:r |") << "no drafts: a plain decode";
}

// One draft list of a file may say that nothing was drafted this time.
TEST(Scheduler, aVerificationWithoutDraftsIsADecodeAndTheNextOneHasDrafts) {
  Server server({});
  RequestSpec spec = spec_of("r", 4, 8);
  spec.drafts = {0, 2};
  spec.accept = {1, 3};
  server.arrive(spec);
  server.step();
  EXPECT_EQ(server.step(), "extend:r:1 step:r |");
  EXPECT_EQ(server.step(), "extend:r:3 step:r |accept:r:3");
  EXPECT_EQ(server.step(), "extend:r:1 step:r |");
}

// A step of 10 tokens is two pages of 4: a prompt is cut where a page ends.
TEST(Scheduler, chunksAreWholePages) {
  Server server({.page = 4, .chunked_prefill = 10});
  server.arrive("r", 19, 1);
  EXPECT_EQ(server.step(), "admit:r extend:r:8 step:r |checkpoint:r");
  EXPECT_EQ(server.step(), "extend:r:8 step:r |checkpoint:r");
  EXPECT_EQ(server.step(), "extend:r:3 step:r |finish:r");
}

// 5 tokens take two pages of the step's four, and nobody gets less than a page.
TEST(Scheduler, aPartialPageCountsAsAWholeOne) {
  Server server({.page = 4, .chunked_prefill = 16});
  for (const char* const name : {"a", "b", "c"}) server.arrive(name, 5, 2);
  EXPECT_EQ(server.step(),
            "admit:a extend:a:5 admit:b extend:b:5 step:a:b |checkpoint:a checkpoint:b");
  Server small({.page = 4, .chunked_prefill = 3});
  small.arrive("a", 5, 1);
  EXPECT_EQ(small.step(), "admit:a extend:a:4 step:a |checkpoint:a");
}

// 20,000 arrivals at one moment, half of them urgent. Neither queue is searched from its front,
// which took 26 s for 30,000 of them.
TEST(Scheduler, manyRequestsArriveAtOnce) {
  Server server({});
  for (int i = 0; i < 20'000; ++i) {
    RequestSpec spec = spec_of("r", 1, 1);
    spec.priority = i % 2;
    server.arrive(spec);
  }
  EXPECT_EQ(server.scheduler().load(), 20'000u);
  server.step();
  EXPECT_EQ(server.scheduler().load(), 20'000u - 256u) << "max_running of them, one token each";
}

// --- With overlap --------------------------------------------------------------------------------

// The second step is decided before the first one's result is there. After the step that samples
// the last token there is none: the request ends by its length, which is known.
TEST(OverlappingScheduler, decidesAStepBeforeTheResultsOfTheOneBefore) {
  Server server({.chunked_prefill = 8, .overlap = 1});
  const RequestNumber r = server.arrive("r", 5, 3);
  EXPECT_EQ(server.step(), "admit:r extend:r:5 step:r");
  EXPECT_EQ(server.news(), "r admitted");
  EXPECT_EQ(server.step(), "extend:r:1 step:r |complete:r checkpoint:r");
  EXPECT_EQ(server.news(), "r has 1");
  EXPECT_EQ(server.step(), "extend:r:1 step:r |complete:r");
  EXPECT_EQ(server.step(), " |complete:r finish:r");
  EXPECT_EQ(server.news(), "r has 2, r has 3, r ends: length");
  EXPECT_TRUE(server.ended(r));
  EXPECT_EQ(server.step(), "");
}

// The scheduler cannot know that the request will stop, so the step after its last token is under
// way: that row belongs to no request.
TEST(OverlappingScheduler, aRequestThatStopsByItselfHasOneExtraRow) {
  Server server({.chunked_prefill = 8, .overlap = 1});
  RequestSpec spec = spec_of("r", 5, 2);
  spec.stops = true;
  const RequestNumber r = server.arrive(spec);
  EXPECT_EQ(server.step(), "admit:r extend:r:5 step:r");
  EXPECT_EQ(server.step(), "extend:r:1 step:r |complete:r checkpoint:r");
  EXPECT_EQ(server.step(), "extend:r:1 step:r |complete:r finish:r");
  EXPECT_EQ(server.news(), "r admitted, r has 1, r has 2, r ends: stop");
  EXPECT_TRUE(server.ended(r));
  EXPECT_EQ(server.step(), "");
}

TEST(OverlappingScheduler, aChunkIsCheckpointedBeforeTheNextOneBegins) {
  Server server({.chunked_prefill = 4, .overlap = 1});
  server.arrive("r", 10, 1);
  EXPECT_EQ(server.step(), "admit:r extend:r:4 step:r");
  EXPECT_EQ(server.step(), "checkpoint:r extend:r:4 step:r |complete:r");
  EXPECT_EQ(server.step(), "checkpoint:r extend:r:2 step:r |complete:r");
  EXPECT_EQ(server.step(), " |complete:r finish:r");
}

TEST(OverlappingScheduler, aRequestWithDraftsToComeMakesEveryStepWait) {
  Server server({.chunked_prefill = 8, .overlap = 1});
  RequestSpec spec = spec_of("r", 5, 5);
  spec.drafts = {2};
  spec.accept = {2};
  server.arrive(spec);
  EXPECT_EQ(server.step(), "admit:r extend:r:5 step:r");
  EXPECT_EQ(server.step(), "complete:r checkpoint:r| extend:r:3 step:r");
  EXPECT_EQ(server.step(), "accept:r:2| extend:r:1 step:r");
  EXPECT_EQ(server.step(), "extend:r:1 step:r |complete:r");
  EXPECT_EQ(server.step(), " |complete:r finish:r");
}

TEST(OverlappingScheduler, aRetractedRequestLosesItsPendingResults) {
  Server server({.chunked_prefill = 8, .overlap = 1});
  const RequestNumber r = server.arrive("r", 5, 3);
  server.step();
  server.step();
  EXPECT_EQ(server.retract(r), "preempt:r");
  EXPECT_EQ(server.step(), "admit:r extend:r:6 step:r");
  EXPECT_EQ(server.step(), "extend:r:1 step:r |complete:r checkpoint:r");
  EXPECT_EQ(server.step(), " |complete:r finish:r");
}

// It has no result that could end it, and nobody comes before it.
TEST(OverlappingScheduler, noRequestIsAdmittedOrDecodedWhileAPromptFindsNoRoom) {
  Server server({.chunked_prefill = 4, .overlap = 1});
  server.arrive("long", 10, 1);
  server.step();
  server.arrive("next", 1, 1);
  server.answer = [](const Operation& asked) {
    return asked.verb == Verb::extend ? Reply::refusal(Refusal::no_kv) : Reply{};
  };
  EXPECT_EQ(server.step(), "checkpoint:long extend:long:4 |complete:long");
  EXPECT_EQ(server.step(), "extend:long:4 abort:long admit:next extend:next:1 abort:next");
}

// The pool is full, and the result that is out ends the request: it is not refused.
TEST(OverlappingScheduler, aLoneRefusedRequestWaitsForItsResults) {
  Server server({.chunked_prefill = 8, .overlap = 1});
  RequestSpec spec = spec_of("r", 5, 2);
  spec.stops = true;
  const RequestNumber r = server.arrive(spec);
  server.step();
  server.step();
  server.answer = [](const Operation& asked) {
    return asked.verb == Verb::extend ? Reply::refusal(Refusal::no_kv) : Reply{};
  };
  EXPECT_EQ(server.step(), "extend:r:1 |complete:r finish:r");
  EXPECT_TRUE(server.ended(r));
  EXPECT_EQ(server.news(), "r admitted, r has 1, r has 2, r ends: stop");
}

// -------------------------------------------------------------------------------------------------

TEST(Scheduler, eventsOutOfOrderBreakTheContract) {
  const auto kind = [](SchedulerEvent::Kind kind) { return SchedulerEvent{.kind = kind}; };
  Scheduler scheduler({});
  EXPECT_THROW(scheduler.step(kind(SchedulerEvent::Kind::reply)), ContractViolation);
  EXPECT_THROW(scheduler.step(kind(SchedulerEvent::Kind::forward_done)), ContractViolation);
  const RequestSpec spec = spec_of("r", 1, 1);
  scheduler.step({.kind = SchedulerEvent::Kind::arrival, .spec = &spec});
  EXPECT_TRUE(scheduler.step(kind(SchedulerEvent::Kind::step_due)).operation);
  EXPECT_THROW(scheduler.step(kind(SchedulerEvent::Kind::step_due)), ContractViolation);
}

// --- Any requests, any refusals ------------------------------------------------------------------

/// Refuses admissions and extends as it likes, but nobody more than a few times in a row, and holds
/// the scheduler to what it may ask.
class MoodySubject {
 public:
  MoodySubject(std::uint64_t seed, const Config& options, std::uint64_t refusals_in_16)
      : seed_(seed), options_(options), refusals_in_16_(refusals_in_16) {}

  std::map<std::string, std::int64_t> known, computed, cached, extended;
  std::map<std::string, std::deque<std::int64_t>> in_flight;  // tokens of extends, oldest first
  std::int64_t prefilled = 0, decoded = 0, largest_step = 0, mixed_steps = 0;

  Reply operator()(const Operation& asked) {
    const std::string id = asked.id.text();
    const bool runs = known.contains(id);
    switch (asked.verb) {
      case Verb::admit:
        EXPECT_FALSE(runs) << id;
        EXPECT_LT(known.size(), static_cast<std::size_t>(options_.max_running));
        EXPECT_EQ(asked.room != Operation::kAbsent, options_.scheduler == "sglang");
        if (moody()) return Reply::refusal(below(9) == 0 ? Refusal::too_long : Refusal::no_kv);
        known[id] = prompt_[id] = asked.tokens.size();
        cached[id] = computed[id] = static_cast<std::int64_t>(below(asked.tokens.size()));
        return options_.scheduler == "sglang" && below(4) == 0
                   ? Reply{}.set(ReplyField::cached, cached[id]).set(ReplyField::kv, asked.room)
                   : Reply{}.set(ReplyField::cached, cached[id]);
      case Verb::extend: EXPECT_TRUE(runs) << id; return extend(asked, id);
      case Verb::complete:
        EXPECT_TRUE(runs) << id << " has ended, and nobody should hear of its results";
        EXPECT_FALSE(in_flight[id].empty());
        extended[id] += in_flight[id].front();
        in_flight[id].pop_front();
        return Reply{};
      case Verb::evict:
        EXPECT_EQ(options_.scheduler, "sglang");
        EXPECT_GE(asked.room, 0);
        if (asked.room > 0 && moody()) return Reply{}.set(ReplyField::kv_free, asked.room - 1);
        return below(2) == 0 ? Reply{} : Reply{}.set(ReplyField::kv_free, asked.room);
      case Verb::accept:
        known[id] += asked.n;
        computed[id] = known[id] - 1;
        return Reply{};
      case Verb::step:
        EXPECT_FALSE(asked.ids.empty());
        for (const Name row : asked.ids) EXPECT_TRUE(known.contains(row.text())) << row.text();
        if (prefilled != 0) largest_step = std::max(largest_step, prefilled);
        if (prefilled != 0 && decoded != 0) ++mixed_steps;
        prefilled = decoded = 0;
        return Reply{};
      case Verb::finish:
        EXPECT_TRUE(runs) << id;
        finished[id] = computed[id];
        for (const std::int64_t ahead : in_flight[id]) finished[id] -= ahead;
        [[fallthrough]];
      case Verb::preempt:
      case Verb::abort:
        EXPECT_TRUE(runs) << id;
        for (auto* const table : {&known, &computed, &prompt_}) table->erase(id);
        in_flight.erase(id);
        return Reply{};
      default: EXPECT_EQ(asked.verb, Verb::checkpoint); return Reply{};
    }
  }
  std::map<std::string, std::int64_t> finished;

 private:
  Reply extend(const Operation& asked, const std::string& id) {
    EXPECT_GE(asked.n, 1);
    if (moody()) return Reply::refusal(Refusal::no_kv);
    const bool prefill = computed[id] < prompt_[id];
    if (asked.drafts.empty()) {
      known[id] += asked.tokens.size();
      EXPECT_LE(computed[id] + asked.n, known[id]) << id;
      computed[id] += asked.n;
    } else {
      EXPECT_FALSE(prefill);
      known[id] += asked.tokens.size();
      EXPECT_EQ(asked.n, known[id] - computed[id] + asked.drafts.size());
    }
    (prefill ? prefilled : decoded) += asked.n;
    EXPECT_EQ(asked.async, options_.overlap != 0 && asked.drafts.empty());
    if (asked.async)
      in_flight[id].push_back(asked.n);
    else
      extended[id] += asked.n;
    EXPECT_LE(in_flight[id].size(), 2u) << "one step ahead";
    return Reply{}.set(ReplyField::n, asked.n);
  }
  std::uint64_t below(std::uint64_t bound) { return random_below(bound, seed_, 1, index_++); }
  bool moody() {
    const bool refuse = in_a_row_ < 5 && below(16) < refusals_in_16_;
    in_a_row_ = refuse ? in_a_row_ + 1 : 0;
    return refuse;
  }

  std::uint64_t seed_;
  Config options_;
  std::uint64_t refusals_in_16_;
  std::uint64_t index_ = 0;
  int in_a_row_ = 0;
  std::map<std::string, std::int64_t> prompt_;
};

using Spoil = std::function<void(SchedulerEpisode&)>;

/// The check's finding where it was told something else than the scheduler did.
std::optional<Finding> serve_random_requests(std::uint64_t seed, const Spoil& spoil = {},
                                             bool judged_by_other_rules = false) {
  std::uint64_t index = 0;
  const auto below = [&](std::uint64_t bound) { return random_below(bound, seed, 0, index++); };
  const Config options{.page = seed % 3 == 0 ? 4 : 1,
                       .chunked_prefill = static_cast<std::int64_t>(1 + below(20)),
                       .max_running = static_cast<std::int64_t>(1 + below(5)),
                       .overlap = seed % 2 == 0,
                       .scheduler = seed % 4 >= 2 ? "sglang" : ""};
  const std::uint64_t refusals = below(3) * 4;
  Config judged_by = options;
  if (judged_by_other_rules) judged_by.scheduler = options.scheduler.empty() ? "sglang" : "";
  Server server(options, judged_by);
  MoodySubject subject(seed, options, refusals);
  server.answer = [&](const Operation& asked) { return subject(asked); };
  server.spoil = spoil;
  std::vector<RequestSpec> specs;
  std::vector<RequestNumber> aborted;
  for (std::uint64_t n = below(9); n > 0; --n) {
    RequestSpec spec = spec_of(fmt::format("r{}", n), static_cast<std::uint32_t>(1 + below(40)),
                               static_cast<std::uint32_t>(1 + below(9)));
    spec.priority = static_cast<std::int64_t>(below(3));
    for (std::uint64_t v = below(4); v > 0; --v) {
      spec.drafts.push_back(static_cast<std::int64_t>(below(4)));
      spec.accept.push_back(
          1 + static_cast<std::int64_t>(below(static_cast<std::uint64_t>(spec.drafts.back()) + 1)));
    }
    specs.push_back(spec);
    const RequestNumber number = server.arrive(spec);
    if (below(2) == 0) server.step();
    if (below(6) == 0) {
      server.abort(number);
      aborted.push_back(number);
    }
    if (below(6) == 0) server.retract(number);
  }
  for (int steps = 0; server.has_work(); ++steps) {
    require(steps < 5000, "everybody gets somewhere");
    server.step();
  }
  EXPECT_LE(subject.largest_step, std::max(options.chunked_prefill, options.page));
  EXPECT_EQ(subject.mixed_steps, 0);
  EXPECT_TRUE(subject.known.empty()) << "everybody was finished or dropped";
  const std::string news = server.news();
  for (RequestNumber number = 0; number < specs.size(); ++number) {
    const RequestSpec& spec = specs[number];
    const std::string& id = spec.id.text();
    EXPECT_TRUE(server.ended(number)) << id;
    const bool finished = subject.finished.contains(id);
    EXPECT_EQ(finished, news.find(id + " ends: length") != std::string::npos) << id;
    if (finished) {
      EXPECT_EQ(subject.finished[id], spec.tokens.size() - 1) << "the last token is no input";
    }
    if (refusals == 0 && !finished) {
      EXPECT_TRUE(std::ranges::count(aborted, number) == 1) << id;
    }
    // Without retraction every token is computed once, and drafts on top.
    if (finished && spec.drafts.empty() && news.find(id + " retracted") == std::string::npos) {
      EXPECT_EQ(subject.cached[id] + subject.extended[id], spec.tokens.size() - 1) << id;
    }
  }
  return server.finding;
}

TEST(Scheduler, underAnyRefusalsEveryRequestEndsAndNoRuleIsBroken) {
  for (std::uint64_t seed = 1; seed <= 3000; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    serve_random_requests(seed);
    if (testing::Test::HasFailure()) return;
  }
}

// --- The check itself ----------------------------------------------------------------------------

// The check notices each single change of what it is told: an operation that is another, missing or
// doubled, a note, a forward. It stops a scheduler that goes on asking before the end.
TEST(SchedulerOracle, noticesEveryDifferentEffect) {
  const std::vector<std::pair<std::string, Spoil>> lies = {
      {"another request", [](auto& e) { e.asked.back().operation.id = Name::intern("other"); }},
      {"one more token", [](auto& e) { e.asked.back().operation.n += 1; }},
      {"another time", [](auto& e) { e.asked.back().operation.async ^= true; }},
      {"another length", [](auto& e) { e.asked.back().operation.up_to += 1; }},
      {"another prompt", [](auto& e) { e.asked.back().operation.prompt += 1; }},
      {"another namespace", [](auto& e) { e.asked.back().operation.salt = Name::intern("x"); }},
      {"other tokens",
       [](auto& e) { e.asked.back().operation.tokens.append(Tokens::of_document(9, 0, 1)); }},
      {"other drafts",
       [](auto& e) { e.asked.back().operation.drafts.append(Tokens::of_document(9, 0, 1)); }},
      {"another row", [](auto& e) { e.asked.back().operation.ids.push_back(Name::intern("x")); }},
      {"other room", [](auto& e) { e.asked.back().operation.room += 1; }},
      {"nothing", [](auto& e) { e.asked.pop_back(); }},
      {"it twice", [](auto& e) { e.asked.push_back(e.asked.back()); }},
      {"a note more",
       [](auto& e) {
         e.notes.push_back({SchedulerNote::Kind::sampled, 0});
       }},
      {"a forward more",
       [](auto& e) {
         e.forward = StepWork{1, 2, 3, 4};
       }},
      {"that it is idle", [](auto& e) { e.idle = !e.idle; }},
      {"that results are due", [](auto& e) { e.status.awaits_results ^= true; }},
      {"another load", [](auto& e) { ++e.status.load; }},
  };
  for (const auto& named : lies)
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
      SCOPED_TRACE(named.first);
      const Spoil& lie = named.second;
      std::uint64_t left = random_below(20, seed, 2, 0);
      bool lied = false;
      const std::optional<Finding> finding =
          serve_random_requests(seed, [&](SchedulerEpisode& episode) {
            if (lied || episode.asked.empty() || left-- != 0) return;
            lie(episode);
            lied = true;
          });
      EXPECT_EQ(finding.has_value(), lied) << "seed " << seed;
    }
}

TEST(SchedulerOracle, noticesASchedulerOfOtherRules) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    bool asked = false;
    const std::optional<Finding> finding = serve_random_requests(
        seed, [&](SchedulerEpisode& episode) { asked |= !episode.asked.empty(); }, true);
    EXPECT_EQ(finding.has_value(), asked) << "seed " << seed;
  }
}

TEST(SchedulerOracle, noticesASchedulerThatNeverStopsAsking) {
  reference::SchedulerOracle check({});
  const RequestSpec spec = spec_of("r", 4, 1);
  SchedulerEpisode episode;
  episode.begin({.kind = SchedulerEvent::Kind::arrival, .spec = &spec});
  episode.status = {.has_work = true, .load = 1};
  EXPECT_FALSE(check.check(episode));
  episode.begin({.kind = SchedulerEvent::Kind::step_due});
  Operation admit;
  admit.verb = Verb::admit;
  admit.id = spec.id;
  admit.tokens = spec.tokens.prefix(4);
  admit.prompt = 4;
  episode.asked.push_back({admit, Reply{}});
  EXPECT_FALSE(check.check_so_far(episode)) << "so it begins";
  episode.notes.push_back({SchedulerNote::Kind::admitted, 0});
  episode.asked.push_back({admit, Reply{}});
  EXPECT_TRUE(check.check_so_far(episode));
  EXPECT_TRUE(check.check(episode)) << "and nothing was noted of what was heard so far";
}

}  // namespace
}  // namespace lockstep::cache_sim
