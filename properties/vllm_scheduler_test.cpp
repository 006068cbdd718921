// vLLM's scheduler (SchedulerOptions::vllm), its subject's answers made by hand, with its oracle
// listening. The same rules beside vLLM's own Scheduler are compared by
// `python3 fixtures/subjects/vllm schedule`.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "properties/support/scheduler_server.hpp"
#include "reference/base/philox.hpp"

namespace lockstep::cache_sim {
namespace {

const SchedulerOptions kRules{.chunked_prefill = 8, .vllm = true};

/// Refuses the extends of these requests, so many times.
struct Refusing {
  std::map<std::string, int> times;
  Reply operator()(const Operation& asked) {
    if (asked.verb != Verb::extend || times[asked.id.text()] == 0) return Reply{};
    --times[asked.id.text()];
    return Reply::refusal(Refusal::no_kv);
  }
};

// A step's tokens go to those who run first, decodes and chunks alike, then to those who wait.
TEST(VllmScheduler, oneStepMixesDecodesAndChunks) {
  Server server(kRules);
  server.arrive("a", 3, 3);
  EXPECT_EQ(server.step(), "admit:a extend:a:3 step:a |");
  server.arrive("b", 12, 2);
  EXPECT_EQ(server.step(), "extend:a:1 admit:b extend:b:7 step:a:b |");
  EXPECT_EQ(server.forward->prefill_tokens, 7);
  EXPECT_EQ(server.forward->decode_tokens, 1);
  EXPECT_EQ(server.step(), "extend:a:1 extend:b:5 step:a:b |finish:a");
  EXPECT_EQ(server.step(), "extend:b:1 step:b |finish:b");
  EXPECT_FALSE(server.has_work());
}

// Where nobody else is there, nobody has to be spared.
TEST(VllmScheduler, aLongPromptLeavesTokensToOthers) {
  Server server({.chunked_prefill = 8, .vllm = true, .long_prefill = 3});
  server.arrive("alone", 11, 1);
  EXPECT_EQ(server.step(), "admit:alone extend:alone:8 step:alone |");
  server.arrive("b", 9, 1);
  EXPECT_EQ(server.step(), "extend:alone:3 admit:b extend:b:3 step:alone:b |finish:alone");
  EXPECT_EQ(server.step(), "extend:b:6 step:b |finish:b");
}

TEST(VllmScheduler, whoIsCutToNothingIsPassedOverOrEndsAdmission) {
  Server server({.chunked_prefill = 8, .vllm = true});
  server.arrive("a", 12, 1);
  server.step();
  server.answer = [](const Operation& asked) {
    return asked.verb == Verb::extend && asked.n < 8 ? Reply{}.set(ReplyField::n, 0) : Reply{};
  };
  server.arrive("b", 4, 1);
  server.arrive("c", 8, 1);
  EXPECT_EQ(server.step(), "extend:a:4 admit:b extend:b:4 preempt:b");
  EXPECT_EQ(server.news(), "a admitted");
}

TEST(VllmScheduler, aCutChunkIsPaidForWhatItTook) {
  Server server({.chunked_prefill = 8, .vllm = true});
  server.arrive("a", 12, 1);
  server.arrive("b", 12, 1);
  server.answer = [](const Operation& asked) {
    return asked.verb == Verb::extend ? Reply{}.set(ReplyField::n, asked.n / 4 * 4) : Reply{};
  };
  EXPECT_EQ(server.step(), "admit:a extend:a:8 step:a |");
  EXPECT_EQ(server.step(), "extend:a:4 admit:b extend:b:4 step:a:b |finish:a");
}

// The last of the running goes to the front of the queue, so several keep their order, and nobody
// is admitted in that step.
TEST(VllmScheduler, theLastOfTheRunningIsPreempted) {
  Server server(kRules);
  for (const char* const id : {"a", "b", "c"}) server.arrive(id, 2, 3);
  server.step();
  server.arrive("d", 1, 1);
  server.answer = Refusing{{{"a", 2}}};
  EXPECT_EQ(server.step(), "extend:a:1 preempt:c extend:a:1 preempt:b extend:a:1 step:a |");
  server.news();
  EXPECT_EQ(server.step(),
            "extend:a:1 admit:b extend:b:3 admit:c extend:c:3 admit:d extend:d:1 step:a:b:c:d "
            "|finish:a finish:d");
}

TEST(VllmScheduler, whoIsPreemptedForItselfEndsTheStep) {
  Server server(kRules);
  server.arrive("a", 2, 3);
  server.arrive("b", 2, 3);
  server.step();
  server.answer = Refusing{{{"b", 1}}};
  EXPECT_EQ(server.step(), "extend:a:1 extend:b:1 preempt:b step:a |");
  EXPECT_EQ(server.step(), "extend:a:1 admit:b extend:b:3 step:a:b |finish:a");
}

TEST(VllmScheduler, whoFitsNowhereIsRefused) {
  Server server(kRules);
  server.answer = Refusing{{{"a", 9}}};
  server.arrive("a", 2, 3);
  server.arrive("b", 2, 1);
  EXPECT_EQ(server.step(), "admit:a extend:a:2 abort:a admit:b extend:b:2 step:b |finish:b");
  EXPECT_EQ(server.news(), "a ends: refused, b admitted, b has 1, b ends: length");
}

// Its pool is too small, which vLLM looks at when it starts.
TEST(VllmScheduler, whoCannotGoOnAloneIsRefusedInTheEnd) {
  Server server({.chunked_prefill = 2, .vllm = true});
  server.answer = [](const Operation& asked) {
    return asked.verb == Verb::extend && asked.n < 2 ? Reply::refusal(Refusal::no_kv) : Reply{};
  };
  const RequestNumber request = server.arrive("a", 3, 3);
  for (int i = 0; i < kLonePreemptions; ++i) {
    EXPECT_EQ(server.step(), "admit:a extend:a:2 step:a |");
    EXPECT_EQ(server.step(), "extend:a:1 preempt:a");
  }
  EXPECT_EQ(server.step(), "admit:a extend:a:2 step:a |");
  EXPECT_EQ(server.step(), "extend:a:1 abort:a");
  EXPECT_TRUE(server.ended(request));
}

// --- Priorities ----------------------------------------------------------------------------------

// The least urgent goes wherever it stands; what it had in this step goes back to the others.
TEST(VllmScheduler, theLeastUrgentIsPreemptedThoughItWasScheduled) {
  Server server({.chunked_prefill = 8, .vllm = true, .by_priority = true});
  RequestSpec low = spec_of("low", 20, 2);
  low.priority = -1;
  server.arrive(low);
  server.step();
  server.arrive("high", 2, 3);
  int refusals = 0;
  server.answer = [&](const Operation& asked) {
    if (asked.verb != Verb::extend) return Reply{};
    if (asked.id.text() == "high" && refusals-- > 0) return Reply::refusal(Refusal::no_kv);
    return Reply{}.set(ReplyField::n, std::min<std::int64_t>(asked.n, 4));
  };
  EXPECT_EQ(server.step(), "extend:low:8 admit:high extend:high:2 step:low:high |");
  refusals = 1;
  EXPECT_EQ(server.step(), "extend:low:8 extend:high:1 preempt:low extend:high:1 step:high |");
  EXPECT_EQ(server.step(), "extend:high:1 admit:low extend:low:7 step:high:low |finish:high");
}

TEST(VllmScheduler, theMoreUrgentIsAdmittedFirst) {
  Server server({.chunked_prefill = 8, .max_running = 1, .vllm = true, .by_priority = true});
  server.arrive("a", 2, 1);
  RequestSpec urgent = spec_of("urgent", 2, 1);
  urgent.priority = 1;
  server.arrive(urgent);
  EXPECT_EQ(server.step(), "admit:urgent extend:urgent:2 step:urgent |finish:urgent");
}

// --- Overlap -------------------------------------------------------------------------------------

TEST(VllmScheduler, aStepIsDecidedBeforeTheResultsOfTheOneBefore) {
  Server server({.chunked_prefill = 8, .overlap = true, .vllm = true});
  server.arrive("a", 3, 3);
  EXPECT_EQ(server.step(), "admit:a extend:a:3 step:a");
  EXPECT_EQ(server.step(), "extend:a:1 step:a |complete:a");
  EXPECT_EQ(server.step(), "extend:a:1 step:a |complete:a");
  EXPECT_EQ(server.news(), "a admitted, a has 1, a has 2");
  // Its third token is under way: no step would bring more.
  EXPECT_EQ(server.step(), " |complete:a finish:a");
  EXPECT_FALSE(server.has_work());
}

TEST(VllmScheduler, whoStopsByItselfHasARowTooMany) {
  Server server({.chunked_prefill = 8, .overlap = true, .vllm = true});
  RequestSpec spec = spec_of("a", 3, 1);
  spec.stops = true;
  server.arrive(spec);
  EXPECT_EQ(server.step(), "admit:a extend:a:3 step:a");
  EXPECT_EQ(server.step(), "extend:a:1 step:a |complete:a finish:a");
  EXPECT_TRUE(server.has_work()) << "its forward is under way";
  EXPECT_EQ(server.step(), " |");
  EXPECT_FALSE(server.has_work());
}

// A preempted request's results still come, to it and not to the subject, and it waits for them.
TEST(VllmScheduler, aPreemptedRequestIsOvertakenUntilItsResultsAreThere) {
  Server server({.chunked_prefill = 8, .overlap = true, .vllm = true});
  server.arrive("a", 3, 9);
  server.arrive("b", 3, 9);
  server.step();
  server.arrive("c", 1, 9);
  server.answer = Refusing{{{"a", 1}}};
  EXPECT_EQ(server.step(), "extend:a:1 preempt:b extend:a:1 step:a |complete:a");
  server.news();
  server.arrive("d", 1, 9);
  EXPECT_EQ(server.step(),
            "extend:a:1 admit:b extend:b:4 admit:c extend:c:1 admit:d extend:d:1 "
            "step:a:b:c:d |complete:a");
}

// --- Any requests, any refusals, any cuts --------------------------------------------------------

struct Played {
  std::set<std::string> seen;
  std::optional<Finding> finding;
};

Played play_random_requests(std::uint64_t seed,
                            const std::function<void(SchedulerEpisode&)>& spoil = {}) {
  std::uint64_t index = 0;
  const auto below = [&](std::uint64_t bound) { return random_below(bound, seed, 0, index++); };
  const SchedulerOptions options{.chunked_prefill = static_cast<std::int64_t>(1 + below(12)),
                                 .max_running = static_cast<std::int64_t>(1 + below(4)),
                                 .overlap = below(2) == 0,
                                 .vllm = true,
                                 .by_priority = below(2) == 0,
                                 .long_prefill = static_cast<std::int64_t>(below(6))};
  Server server(options);
  server.spoil = spoil;
  Played played;
  int in_a_row = 0;
  server.answer = [&](const Operation& asked) {
    played.seen.insert(std::string(to_string(asked.verb)));
    const bool moody = in_a_row < 4 && below(8) == 0;
    in_a_row = moody ? in_a_row + 1 : 0;
    if (asked.verb == Verb::admit)
      return moody ? Reply::refusal(Refusal::no_kv)
                   : Reply{}.set(ReplyField::cached,
                                 static_cast<std::int64_t>(below(asked.tokens.size())));
    if (asked.verb != Verb::extend) return Reply{};
    EXPECT_GE(asked.n, 1);
    EXPECT_EQ(asked.async, options.overlap);
    if (moody && below(2) == 0) return Reply::refusal(Refusal::no_kv);
    if (!asked.tokens.empty() || !moody) return Reply{}.set(ReplyField::n, asked.n);
    return Reply{}.set(ReplyField::n,
                       static_cast<std::int64_t>(below(static_cast<std::uint64_t>(asked.n) + 1)));
  };
  std::vector<RequestNumber> requests;
  for (int i = 0; i < 12; ++i) {
    RequestSpec spec = spec_of(fmt::format("r{}", i), static_cast<std::uint32_t>(1 + below(15)),
                               static_cast<std::uint32_t>(1 + below(5)));
    spec.stops = below(2) == 0;
    spec.priority = static_cast<std::int64_t>(below(3));
    requests.push_back(server.arrive(spec));
    for (std::uint64_t steps = below(4); steps > 0; --steps) server.step();
    const RequestNumber one = requests[below(requests.size())];
    if (below(10) == 0) server.abort(one);
    if (below(10) == 0) server.retract(one);
  }
  for (int i = 0; i < 2000 && server.has_work(); ++i) server.step();
  EXPECT_FALSE(server.has_work()) << "seed " << seed;
  for (const RequestNumber request : requests) EXPECT_TRUE(server.ended(request));
  played.finding = server.finding;
  return played;
}

TEST(VllmScheduler, anyRequestsEndAsTheRulesSay) {
  std::set<std::string> seen;
  for (std::uint64_t seed = 0; seed < 300 && !HasFailure(); ++seed)
    seen.merge(play_random_requests(seed).seen);
  for (const char* const verb :
       {"admit", "extend", "preempt", "step", "complete", "finish", "abort"})
    EXPECT_TRUE(seen.contains(verb)) << verb;
}

// The check is no check unless it notices.
TEST(VllmScheduler, aRuleThatIsBrokenIsNoticed) {
  const std::function<void(SchedulerEpisode&)> spoils[] = {
      [](SchedulerEpisode& heard) {
        for (auto& exchange : heard.asked)
          if (exchange.operation.verb == Verb::extend && exchange.operation.n > 1)
            --exchange.operation.n;
      },
      [](SchedulerEpisode& heard) {
        for (auto& exchange : heard.asked)
          if (exchange.operation.ids.size() > 1)
            std::swap(exchange.operation.ids[0], exchange.operation.ids[1]);
      },
      [](SchedulerEpisode& heard) {
        if (!heard.asked.empty() && heard.asked.back().operation.verb == Verb::preempt)
          heard.asked.pop_back();
      },
      [](SchedulerEpisode& heard) { heard.notes.clear(); }};
  for (const auto& spoil : spoils) {
    bool noticed = false;
    for (std::uint64_t seed = 0; seed < 20 && !noticed; ++seed)
      noticed = play_random_requests(seed, spoil).finding.has_value();
    EXPECT_TRUE(noticed) << &spoil - spoils;
  }
}

}  // namespace
}  // namespace lockstep::cache_sim
