// The scheduler under SGLang's rules (`scheduler=sglang`), its subject's answers made by
// hand: how a step finds room, who is retracted, who is admitted again. The same rules beside
// SGLang's own scheduler are compared by `python3 fixtures/subjects/sglang schedule`.
#include <gtest/gtest.h>

#include "properties/cache_sim/server/scheduler_server.hpp"

namespace lockstep::cache_sim {
namespace {

const Config kRules{.chunked_prefill = 8, .scheduler = "sglang"};

/// Says that so much is free after each `evict room=`, from the first one of `queue` on.
struct Free {
  std::deque<std::int64_t> queue;
  Reply operator()(const Operation& asked) {
    if (asked.verb != Verb::evict || queue.empty()) return Reply{};
    const std::int64_t free = queue.front();
    queue.pop_front();
    return Reply{}.set(ReplyField::kv_free, free);
  }
};

// A prompt has to leave a page beside each prompt of the step; room is made for all of them at
// once.
TEST(SglangScheduler, aStepsPromptsAreFoundBeforeTheFirstIsComputed) {
  Server server(kRules);
  server.arrive("a", 3, 2);
  server.arrive("b", 9, 2);
  EXPECT_EQ(server.step(),
            "admit:a:room2 admit:b:room6 evict:room8 extend:a:3 extend:b:5 step:a:b "
            "|checkpoint:a checkpoint:b");
  EXPECT_EQ(server.step(), "evict:room4 extend:b:4 step:b |checkpoint:b");
  EXPECT_EQ(server.step(), "evict:room2 extend:a:1 extend:b:1 step:a:b |finish:a finish:b");
}

TEST(SglangScheduler, withPagesEveryRowAsksForOneTokenMoreThanItNeeds) {
  Server server({.page = 4, .chunked_prefill = 16, .scheduler = "sglang"});
  server.arrive("a", 3, 3);
  server.arrive("b", 8, 3);
  EXPECT_EQ(server.step(),
            "admit:a:room5 admit:b:room13 evict:room19 extend:a:3 extend:b:8 step:a:b "
            "|checkpoint:a checkpoint:b");
  EXPECT_EQ(server.step(), "evict:room4 evict:room8 extend:a:1 extend:b:1 step:a:b |");
}

// The fewest outputs first, then the longest prompt, then who came last; they wait at the end, and
// the rows go on in the order in which they would have gone.
TEST(SglangScheduler, theRequestWithTheFewestOutputsIsRetracted) {
  Server server({.chunked_prefill = 100, .scheduler = "sglang"});
  server.arrive("old", 4, 9);
  server.step();
  server.step();
  server.arrive("long", 7, 9);
  server.arrive("short", 5, 9);
  server.step();
  server.news();
  Free free{{2, 40, 1, 20, 1}};
  server.answer = [&](const Operation& asked) { return free(asked); };
  EXPECT_EQ(server.step(),
            "evict:room3 preempt:long evict:room40 evict:room2 preempt:short evict:room20 "
            "evict:room1 extend:old:1 step:old |");
  EXPECT_EQ(server.news(), "long retracted, short retracted, old has 3");
  server.arrive("new", 2, 2);
  EXPECT_EQ(server.step(),
            "admit:long:room2 admit:short:room11 admit:new:room18 evict:room16 extend:long:8 "
            "extend:short:6 extend:new:2 step:long:short:new "
            "|checkpoint:long checkpoint:short checkpoint:new");
}

TEST(SglangScheduler, rowsStayInTheOrderOfRetraction) {
  Server server({.chunked_prefill = 100, .scheduler = "sglang"});
  server.arrive("long", 7, 9);
  server.arrive("short", 5, 9);
  server.arrive("longest", 9, 9);
  server.step();
  Free free{{2, 40, 2}};
  server.answer = [&](const Operation& asked) { return free(asked); };
  EXPECT_EQ(server.step(),
            "evict:room3 preempt:longest evict:room40 evict:room2 extend:short:1 extend:long:1 "
            "step:short:long |");
}

TEST(SglangScheduler, aLoneRequestWithoutRoomIsRefused) {
  Server server(kRules);
  server.arrive("r", 3, 5);
  server.step();
  server.news();
  Free free{{0}};
  server.answer = [&](const Operation& asked) { return free(asked); };
  EXPECT_EQ(server.step(), "evict:room1 abort:r");
  EXPECT_EQ(server.news(), "r ends: refused");
}

// After a refusal nobody is looked at until a request has left.
TEST(SglangScheduler, admissionIsClosedUntilARequestLeaves) {
  Server server({.chunked_prefill = 100, .scheduler = "sglang"});
  server.arrive("a", 3, 4);
  server.step();
  server.step();
  server.arrive("b", 4, 2);
  bool refuse = true;
  server.answer = [&](const Operation& asked) {
    return refuse && asked.verb == Verb::admit ? Reply::refusal(Refusal::no_kv) : Reply{};
  };
  EXPECT_EQ(server.step(), "admit:b:room2 evict:room1 extend:a:1 step:a |");
  refuse = false;
  EXPECT_EQ(server.step(), "evict:room1 extend:a:1 step:a |finish:a");
  EXPECT_EQ(server.step(), "admit:b:room2 evict:room4 extend:b:4 step:b |checkpoint:b");
}

// Admission is also closed where the last one admitted has taken all that is left.
TEST(SglangScheduler, admissionIsClosedWhereTheLastAdmittedTookAllThatWasLeft) {
  Server server({.chunked_prefill = 100, .scheduler = "sglang"});
  server.answer = [](const Operation& asked) {
    return asked.verb == Verb::admit ? Reply{}.set(ReplyField::kv, 4) : Reply{};
  };
  server.arrive("a", 3, 4);
  server.arrive("b", 3, 4);
  EXPECT_EQ(server.step(), "admit:a:room2 evict:room3 extend:a:3 step:a |checkpoint:a");
}

// With a result out that ends a request, its memory is waited for.
TEST(SglangScheduler, noRequestIsRetractedWhileAnotherEnds) {
  Server server({.chunked_prefill = 100, .overlap = 1, .scheduler = "sglang"});
  server.arrive("ends", 3, 2);
  server.arrive("goes_on", 3, 9);
  server.step();
  server.step();
  Free free{{0}};
  server.answer = [&](const Operation& asked) { return free(asked); };
  EXPECT_EQ(server.step(), "evict:room1 |complete:ends finish:ends complete:goes_on");
  EXPECT_EQ(server.step(), "evict:room1 extend:goes_on:1 step:goes_on");
}

// A forward whose requests have all left is waited for: no step is decided two forwards ahead.
TEST(SglangScheduler, aForwardWhoseRequestsHaveAllLeftIsWaitedFor) {
  for (const bool sglang : {false, true}) {
    Server server({.chunked_prefill = 100, .overlap = 1, .scheduler = sglang ? "sglang" : ""});
    RequestSpec spec = spec_of("stops", 3, 1);
    spec.stops = true;
    server.arrive(spec);
    server.step();
    server.step();  // one row too many, and the result that ends the request
    server.arrive("next", 4, 9);
    server.step();
    EXPECT_EQ(server.waited, sglang);
  }
}

}  // namespace
}  // namespace lockstep::cache_sim
