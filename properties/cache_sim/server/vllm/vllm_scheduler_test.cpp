// vLLM's scheduler (`scheduler=vllm`), its subject's answers made by hand, with its oracle
// listening. The same rules beside vLLM's own Scheduler are compared by
// `python3 fixtures/subjects/vllm schedule`.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "cache_sim/server/vllm/vllm_scheduler.hpp"
#include "properties/cache_sim/server/scheduler_server.hpp"
#include "reference/base/philox.hpp"

namespace lockstep::cache_sim {
namespace {

const Config kRules{.chunked_prefill = 8, .scheduler = "vllm"};

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

// A long prompt that is alone takes the whole step.
TEST(VllmScheduler, aLongPromptLeavesTokensToOthers) {
  Server server({.chunked_prefill = 8, .scheduler = "vllm:long_prefill=3"});
  server.arrive("alone", 11, 1);
  EXPECT_EQ(server.step(), "admit:alone extend:alone:8 step:alone |");
  server.arrive("b", 9, 1);
  EXPECT_EQ(server.step(), "extend:alone:3 admit:b extend:b:3 step:alone:b |finish:alone");
  EXPECT_EQ(server.step(), "extend:b:6 step:b |finish:b");
}

TEST(VllmScheduler, aRequestCutToNothingIsPassedOverOrEndsAdmission) {
  Server server({.chunked_prefill = 8, .scheduler = "vllm"});
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

TEST(VllmScheduler, aCutChunkCostsWhatWasComputed) {
  Server server({.chunked_prefill = 8, .scheduler = "vllm"});
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
TEST(VllmScheduler, theLastRunningRequestIsPreempted) {
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

TEST(VllmScheduler, aRequestPreemptedForItselfEndsTheStep) {
  Server server(kRules);
  server.arrive("a", 2, 3);
  server.arrive("b", 2, 3);
  server.step();
  server.answer = Refusing{{{"b", 1}}};
  EXPECT_EQ(server.step(), "extend:a:1 extend:b:1 preempt:b step:a |");
  EXPECT_EQ(server.step(), "extend:a:1 admit:b extend:b:3 step:a:b |finish:a");
}

TEST(VllmScheduler, aRequestThatFitsNowhereIsRefused) {
  Server server(kRules);
  server.answer = Refusing{{{"a", 9}}};
  server.arrive("a", 2, 3);
  server.arrive("b", 2, 1);
  EXPECT_EQ(server.step(), "admit:a extend:a:2 abort:a admit:b extend:b:2 step:b |finish:b");
  EXPECT_EQ(server.news(), "a ends: refused, b admitted, b has 1, b ends: length");
}

// Its pool is too small, which vLLM looks at when it starts.
TEST(VllmScheduler, aLoneRequestThatCannotGoOnIsRefusedInTheEnd) {
  Server server({.chunked_prefill = 2, .scheduler = "vllm"});
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
TEST(VllmScheduler, theLeastUrgentRequestIsPreemptedThoughItWasScheduled) {
  Server server({.chunked_prefill = 8, .scheduler = "vllm:priority"});
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

TEST(VllmScheduler, theMoreUrgentRequestIsAdmittedFirst) {
  Server server({.chunked_prefill = 8, .max_running = 1, .scheduler = "vllm:priority"});
  server.arrive("a", 2, 1);
  RequestSpec urgent = spec_of("urgent", 2, 1);
  urgent.priority = 1;
  server.arrive(urgent);
  EXPECT_EQ(server.step(), "admit:urgent extend:urgent:2 step:urgent |finish:urgent");
}

// --- Drafts --------------------------------------------------------------------------------------

RequestSpec drafting(const std::string& id, std::uint32_t prompt, std::uint32_t output,
                     std::vector<std::int64_t> drafts, std::vector<std::int64_t> accept) {
  RequestSpec spec = spec_of(id, prompt, output);
  spec.drafts = std::move(drafts);
  spec.accept = std::move(accept);
  return spec;
}

// Rows of a step have as many drafts as there are: none, some, and at most what is configured.
TEST(VllmScheduler, aRowHasAsManyDraftsAsWereDrafted) {
  Server server({.chunked_prefill = 16, .drafts = 3, .scheduler = "vllm"});
  server.arrive(drafting("a", 3, 9, {2, 0, 5}, {2, 1, 6}));
  EXPECT_EQ(server.step(), "admit:a extend:a:3 step:a |accept:a:1");
  EXPECT_EQ(server.step(), "extend:a:3 step:a |accept:a:2");
  EXPECT_EQ(server.step(), "extend:a:1 step:a |accept:a:1");
  EXPECT_EQ(server.step(), "extend:a:4 step:a |accept:a:4");
  EXPECT_EQ(server.step(), "extend:a:1 step:a |accept:a:1 finish:a");
}

// The client sees nothing after the output's end.
TEST(VllmScheduler, anOutputEndsInsideAnAcceptedRun) {
  Server server({.chunked_prefill = 16, .drafts = 3, .scheduler = "vllm"});
  server.arrive(drafting("a", 3, 3, {3}, {4}));
  server.step();
  EXPECT_EQ(server.step(), "extend:a:4 step:a |accept:a:2 finish:a");
}

TEST(VllmScheduler, draftsThatDoNotFitAreLost) {
  Server server({.chunked_prefill = 4, .drafts = 3, .scheduler = "vllm"});
  server.arrive(drafting("a", 2, 9, {3, 3}, {4, 4}));
  server.arrive(drafting("b", 2, 9, {3, 3}, {4, 4}));
  server.step();
  EXPECT_EQ(server.step(), "extend:a:4 step:a |accept:a:4");
  Server narrow({.chunked_prefill = 5, .drafts = 3, .scheduler = "vllm"});
  narrow.arrive(drafting("a", 2, 9, {3}, {4}));
  narrow.arrive(drafting("b", 2, 9, {3}, {4}));
  narrow.step();
  EXPECT_EQ(narrow.step(), "extend:a:4 extend:b:1 step:a:b |accept:a:4 accept:b:1");
}

// A draft model reads a place more for each row.
TEST(VllmScheduler, aRowLeavesAPlaceToADraftModel) {
  Server server({.chunked_prefill = 8, .drafts = 2, .scheduler = "vllm:draft_model"});
  server.arrive(drafting("a", 3, 9, {2, 2}, {1, 1}));
  server.arrive("b", 9, 1);
  EXPECT_EQ(server.step(), "admit:a extend:a:3 admit:b extend:b:3 step:a:b |accept:a:1");
  EXPECT_EQ(server.step(), "extend:a:3 extend:b:3 step:a:b |accept:a:1");
}

Reply all_but_one_cached(const Operation& asked) {
  return asked.verb == Verb::admit ? Reply{}.set(ReplyField::cached, asked.tokens.size() - 1)
                                   : Reply{};
}

TEST(VllmScheduler, aRequestAdmittedToDecodeIsPadded) {
  Server server({.chunked_prefill = 16, .drafts = 2, .scheduler = "vllm"});
  server.answer = all_but_one_cached;
  server.arrive(drafting("a", 5, 9, {2}, {3}));
  EXPECT_EQ(server.step(), "admit:a extend:a:3 step:a |accept:a:1");
  EXPECT_EQ(server.step(), "extend:a:3 step:a |accept:a:3");
}

// The subject leaves the drafts out where it would have to cut the row.
TEST(VllmScheduler, paddingIsLeftOutWhereTheRowWouldBeCut) {
  Server server({.chunked_prefill = 16, .drafts = 2, .scheduler = "vllm"});
  server.answer = [](const Operation& asked) {
    return asked.verb == Verb::extend ? Reply{}.set(ReplyField::n, 1) : all_but_one_cached(asked);
  };
  server.arrive("a", 5, 1);
  EXPECT_EQ(server.step(), "admit:a extend:a:3 step:a |accept:a:1 finish:a");
}

TEST(VllmScheduler, noRowIsPaddedBesideAPrefill) {
  Server server({.chunked_prefill = 8, .drafts = 2, .scheduler = "vllm"});
  server.arrive("long", 14, 1);
  server.step();
  server.answer = all_but_one_cached;
  server.arrive("a", 5, 1);
  EXPECT_EQ(server.step(),
            "extend:long:6 admit:a extend:a:1 step:long:a |accept:long:1 finish:long accept:a:1 "
            "finish:a");
}

// Rather nobody than one without its places.
TEST(VllmScheduler, admissionEndsWhereThePaddingDoesNotFit) {
  Server server({.chunked_prefill = 5, .drafts = 2, .scheduler = "vllm"});
  server.arrive(drafting("a", 3, 9, {2}, {1}));
  server.step();
  server.answer = all_but_one_cached;
  server.arrive("b", 5, 1);
  server.arrive("c", 5, 1);
  EXPECT_EQ(server.step(), "extend:a:3 admit:b preempt:b step:a |accept:a:1");
}

TEST(VllmScheduler, aClientGoesDuringAVerification) {
  Server server({.chunked_prefill = 8, .drafts = 3, .scheduler = "vllm"});
  const RequestNumber request = server.arrive(drafting("a", 3, 9, {3, 3}, {4, 4}));
  server.step();
  EXPECT_EQ(server.decide(), "extend:a:4 step:a");
  EXPECT_EQ(server.abort(request), "abort:a");
  EXPECT_EQ(server.results(), "");
  EXPECT_FALSE(server.has_work());
}

// A fair share of the step, where that is more than the threshold.
TEST(VllmScheduler, theThresholdIsAtLeastAFairShareOfTheStep) {
  Server server({.chunked_prefill = 12, .scheduler = "vllm:long_prefill=2:adaptive"});
  for (const char* const id : {"a", "b", "c"}) server.arrive(id, 9, 1);
  EXPECT_EQ(server.step(), "admit:a extend:a:4 admit:b extend:b:4 admit:c extend:c:4 step:a:b:c |");
}

// A step ahead, nobody knows how many drafts will be kept: a row begins after all of them.
TEST(VllmScheduler, withOverlapARowHasPlacesForAllDrafts) {
  Server server({.chunked_prefill = 16, .overlap = 1, .drafts = 2, .scheduler = "vllm"});
  server.arrive(drafting("a", 3, 5, {2, 1}, {3, 1}));
  EXPECT_EQ(server.step(), "admit:a extend:a:3 step:a");
  EXPECT_EQ(server.step(), "extend:a:3 step:a |accept:a:1");
  EXPECT_EQ(server.forward->context_tokens, 3);
  EXPECT_EQ(server.step(), "extend:a:3 step:a |accept:a:3");
  EXPECT_EQ(server.forward->context_tokens, 6);
  // Four are there, and the row under way brings one more at least.
  EXPECT_EQ(server.step(), " |accept:a:1 finish:a");
  EXPECT_FALSE(server.has_work());
}

// --- Images --------------------------------------------------------------------------------------

RequestSpec looking(const std::string& id, std::uint32_t prompt,
                    std::vector<RequestSpec::Image> images, Document document = 1) {
  RequestSpec spec = spec_of(id, prompt, 1);
  spec.tokens = Tokens::of_document(document, 0, prompt).followed_by(Tokens::of_document(9, 0, 1));
  spec.images = std::move(images);
  return spec;
}

TEST(VllmScheduler, aRowEndsBeforeAnImageThatTheStepCannotEncode) {
  Server server({.chunked_prefill = 20, .scheduler = "vllm:encoder=5:encoder_cache=9"});
  server.arrive(looking("a", 12, {{2, 4}, {7, 3}}));
  EXPECT_EQ(server.step(), "admit:a extend:a:7 step:a |");
  EXPECT_EQ(server.step(), "extend:a:5 step:a |finish:a");
}

// Images that other requests have had encoded cost nothing; a request that would begin in an image
// is overtaken.
TEST(VllmScheduler, anImageIsEncodedOnceForAll) {
  Server server({.chunked_prefill = 20, .scheduler = "vllm:encoder=4:encoder_cache=8"});
  server.arrive(looking("a", 5, {{0, 4}}));
  server.arrive(looking("other", 5, {{0, 4}}, 3));
  server.arrive(looking("same", 6, {{0, 4}}));
  EXPECT_EQ(server.step(),
            "admit:a extend:a:5 admit:other preempt:other admit:same extend:same:6 step:a:same "
            "|finish:a finish:same");
  EXPECT_EQ(server.step(), "admit:other extend:other:5 step:other |finish:other");
}

// Places are there again when the image's tokens are computed, and are taken from whom nobody
// needs.
TEST(VllmScheduler, theEncoderCacheHoldsAsManyPlacesAsConfigured) {
  Server server({.chunked_prefill = 6, .scheduler = "vllm:encoder=6:encoder_cache=6"});
  server.arrive(looking("a", 8, {{2, 6}}));
  server.arrive(looking("b", 8, {{0, 5}}, 3));
  EXPECT_EQ(server.step(), "admit:a extend:a:6 step:a |");
  EXPECT_EQ(server.step(), "extend:a:2 admit:b preempt:b step:a |finish:a");
  EXPECT_EQ(server.step(), "admit:b extend:b:6 step:b |");
}

TEST(VllmScheduler, wholeImagesAreNotCutByAStep) {
  Server server({.chunked_prefill = 8, .scheduler = "vllm:encoder=9:encoder_cache=9:whole_images"});
  server.arrive(looking("a", 12, {{5, 4}}));
  EXPECT_EQ(server.step(), "admit:a extend:a:5 step:a |");
  EXPECT_EQ(server.step(), "extend:a:7 step:a |finish:a");
  server.arrive(looking("large", 12, {{0, 9}}));
  EXPECT_EQ(server.step(), "");
  EXPECT_EQ(server.news(), "a admitted, a has 1, a ends: length, large ends: refused");
}

// --- Overlap -------------------------------------------------------------------------------------

TEST(VllmScheduler, aStepIsDecidedBeforeTheResultsOfTheOneBefore) {
  Server server({.chunked_prefill = 8, .overlap = 1, .scheduler = "vllm"});
  server.arrive("a", 3, 3);
  EXPECT_EQ(server.step(), "admit:a extend:a:3 step:a");
  EXPECT_EQ(server.step(), "extend:a:1 step:a |complete:a");
  EXPECT_EQ(server.step(), "extend:a:1 step:a |complete:a");
  EXPECT_EQ(server.news(), "a admitted, a has 1, a has 2");
  // Its third token is under way: no step would bring more.
  EXPECT_EQ(server.step(), " |complete:a finish:a");
  EXPECT_FALSE(server.has_work());
}

TEST(VllmScheduler, aRequestThatStopsByItselfHasOneExtraRow) {
  Server server({.chunked_prefill = 8, .overlap = 1, .scheduler = "vllm"});
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
  Server server({.chunked_prefill = 8, .overlap = 1, .scheduler = "vllm"});
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

// --- Loads from a CPU tier -----------------------------------------------------------------------

Config with_tier(Config config) {
  config.put("cpu_chunks", 8);
  return config;
}

/// Admissions of these requests find so many tokens on the host. Their loads land after as many
/// steps, and their first chunks are refused as often, as is said.
struct Loading {
  std::map<std::string, std::int64_t> host;
  std::map<std::string, int> lands_after{}, refused_after_load{};
  std::string same_step{};  ///< an admission that is refused once
  Reply operator()(const Operation& asked) {
    const std::string id = asked.id.exists() ? asked.id.text() : "";
    if (asked.verb == Verb::admit && id == same_step) {
      same_step.clear();
      return Reply::refusal(Refusal::same_step);
    }
    if (asked.verb == Verb::admit)
      return Reply{}.set(ReplyField::cached, host[id]).set(ReplyField::host, host[id]);
    if (asked.verb == Verb::complete && lands_after[id]-- > 0)
      return Reply::refusal(Refusal::same_step);
    if (asked.verb == Verb::extend && asked.n > 0 && refused_after_load[id]-- > 0)
      return Reply::refusal(Refusal::no_kv);
    return Reply{};
  }
};

// A request that loads has no row, holds nobody up, and goes on before requests without blocks.
TEST(VllmScheduler, othersRunWhileARequestLoads) {
  Server server(with_tier(kRules));
  server.answer = Loading{{{"a", 4}}, {{"a", 1}}};
  server.arrive("a", 6, 2);
  server.arrive("b", 3, 3);
  EXPECT_EQ(server.step(), "admit:a extend:a:0 admit:b extend:b:3 step:b |");
  EXPECT_EQ(server.news(), "b admitted, b has 1");
  server.arrive("c", 8, 1);
  EXPECT_EQ(server.step(), "extend:b:1 complete:a admit:c extend:c:7 step:b:c |");
  EXPECT_EQ(server.step(),
            "extend:b:1 extend:c:1 complete:a extend:a:2 step:b:c:a |finish:b finish:c");
  EXPECT_EQ(server.step(), "extend:a:1 step:a |finish:a");
}

// Requests that load wait in the order in which their loads began, in front of all others, or in
// order of priority.
TEST(VllmScheduler, loadedRequestsGoFirst) {
  for (const bool by_priority : {false, true}) {
    Server server(with_tier({.chunked_prefill = 8,
                             .max_running = 1,
                             .scheduler = by_priority ? "vllm:priority" : "vllm"}));
    server.answer = Loading{{{"a", 4}, {"b", 4}}};
    for (const char* const id : {"a", "b", "c"}) {
      RequestSpec spec = spec_of(id, 5, 1);
      spec.priority = *id == 'b' ? 1 : 0;
      server.arrive(spec);
    }
    server.step();
    EXPECT_EQ(server.step(), by_priority ? "complete:b extend:b:1 step:b |finish:b"
                                         : "complete:a extend:a:1 step:a |finish:a")
        << "c runs first";
  }
}

// With its blocks, a loaded request waits for more of them, and nobody is admitted meanwhile.
TEST(VllmScheduler, aLoadedRequestThatFindsNoRoomKeepsItsBlocks) {
  Server server(with_tier(kRules));
  server.answer = Loading{{{"a", 4}}, {}, {{"a", 1}}};
  server.arrive("b", 1, 9);
  server.arrive("a", 6, 1);
  EXPECT_EQ(server.step(), "admit:b extend:b:1 admit:a extend:a:0 step:b |");
  server.arrive("c", 1, 1);
  EXPECT_EQ(server.step(), "extend:b:1 complete:a extend:a:2 step:b |");
  EXPECT_EQ(server.step(),
            "extend:b:1 extend:a:2 admit:c extend:c:1 step:b:a:c |finish:a finish:c");
}

// Copies may hold blocks for two steps; after them a request that is next and does not fit never
// will.
TEST(VllmScheduler, aLoneLoadedRequestThatFitsNowhereIsRefused) {
  Server server(with_tier(kRules));
  server.answer = Loading{{{"a", 4}}, {}, {{"a", 2}}};
  server.arrive("a", 6, 1);
  EXPECT_EQ(server.step(), "admit:a extend:a:0 step");
  EXPECT_EQ(server.step(), "complete:a extend:a:2 step");
  EXPECT_EQ(server.step(), "extend:a:2 abort:a step");
  EXPECT_EQ(server.news(), "a ends: refused");
}

TEST(VllmScheduler, aRequestWhoseCopiesAreUnderWayIsPassedOver) {
  Server server(with_tier(kRules));
  server.answer = Loading{.host = {}, .same_step = "a"};
  server.arrive("a", 3, 1);
  server.arrive("b", 3, 1);
  EXPECT_EQ(server.step(), "admit:a admit:b extend:b:3 step:b |finish:b");
  EXPECT_EQ(server.step(), "admit:a extend:a:3 step:a |finish:a");
}

// A retraction does not reach a request that loads; its client's leaving does.
TEST(VllmScheduler, aLoadingRequestIsAbortedAndNotRetracted) {
  Server server(with_tier(kRules));
  server.answer = Loading{{{"a", 4}}};
  const RequestNumber a = server.arrive("a", 6, 1);
  EXPECT_EQ(server.step(), "admit:a extend:a:0 step");
  EXPECT_EQ(server.retract(a), "");
  EXPECT_EQ(server.abort(a), "abort:a");
  EXPECT_FALSE(server.has_work());
}

// --- Any requests, any refusals, any cuts --------------------------------------------------------

struct Played {
  std::set<std::string> seen;
  std::optional<Finding> finding;
};

RequestSpec random_request(int i, const std::function<std::uint64_t(std::uint64_t)>& below) {
  RequestSpec spec = spec_of(fmt::format("r{}", i), static_cast<std::uint32_t>(1 + below(15)),
                             static_cast<std::uint32_t>(1 + below(5)));
  spec.stops = below(2) == 0;
  spec.priority = static_cast<std::int64_t>(below(3));
  for (std::uint64_t verifications = below(5); verifications > 0; --verifications) {
    spec.drafts.push_back(static_cast<std::int64_t>(below(5)));
    spec.accept.push_back(
        static_cast<std::int64_t>(1 + below(static_cast<std::uint64_t>(spec.drafts.back()) + 1)));
  }
  for (std::uint32_t at = static_cast<std::uint32_t>(below(8)); at < spec.prompt_size; at += 5) {
    const auto size = static_cast<std::uint32_t>(1 + below(5));
    if (at + size <= spec.prompt_size) spec.images.push_back({at, size});
  }
  return spec;
}

Played play_random_requests(std::uint64_t seed,
                            const std::function<void(SchedulerEpisode&)>& spoil = {}) {
  std::uint64_t index = 0;
  const auto below = [&](std::uint64_t bound) { return random_below(bound, seed, 0, index++); };
  std::string scheduler = below(2) == 0 ? "vllm:priority" : "vllm";
  if (const std::uint64_t tokens = below(6); tokens > 0)
    scheduler += fmt::format(":long_prefill={}", tokens);
  if (below(3) == 0) scheduler += ":adaptive";
  const bool loads = random_below(3, seed, 1, 0) == 0;  // beside neither images nor drafts
  if (below(2) == 0 && !loads)
    scheduler += fmt::format(":encoder={}:encoder_cache={}", 5 + below(5), 5 + below(8));
  const Config options{.chunked_prefill = static_cast<std::int64_t>(1 + below(12)),
                       .max_running = static_cast<std::int64_t>(1 + below(4)),
                       .overlap = loads ? 0 : static_cast<std::int64_t>(below(2)),
                       .drafts = loads ? 0 : static_cast<std::int64_t>(below(2) * below(4)),
                       .scheduler = scheduler};
  Server server(loads ? with_tier(options) : options);
  server.spoil = spoil;
  Played played;
  int in_a_row = 0;
  std::set<std::string> fresh;  // looked up in this step
  server.answer = [&](const Operation& asked) {
    played.seen.insert(std::string(to_string(asked.verb)));
    if (asked.verb == Verb::admit)
      fresh.insert(asked.id.text());
    else if (asked.verb == Verb::step)
      fresh.clear();
    if (!asked.drafts.empty()) played.seen.insert("drafts");
    const bool moody = in_a_row < 4 && below(8) == 0;
    in_a_row = moody ? in_a_row + 1 : 0;
    if (loads && asked.verb == Verb::admit && below(3) > 0) {
      const auto host = static_cast<std::int64_t>(below(asked.tokens.size()));
      return moody ? Reply::refusal(Refusal::same_step)
                   : Reply{}.set(ReplyField::cached, host).set(ReplyField::host, host);
    }
    if (loads && asked.verb == Verb::complete) {
      played.seen.insert(moody ? "load awaited" : "load");
      return moody ? Reply::refusal(Refusal::same_step) : Reply{};
    }
    if (loads && asked.n == 0) {
      EXPECT_TRUE(asked.async);
      return moody ? Reply::refusal(Refusal::no_kv) : Reply{}.set(ReplyField::n, 0);
    }
    if (asked.verb == Verb::admit)
      return moody ? Reply::refusal(Refusal::no_kv)
                   : Reply{}.set(ReplyField::cached,
                                 static_cast<std::int64_t>(below(asked.tokens.size())));
    if (asked.verb != Verb::extend) return Reply{};
    EXPECT_GE(asked.n, 1);
    EXPECT_EQ(asked.async, options.overlap != 0);
    if (moody && below(2) == 0) return Reply::refusal(Refusal::no_kv);
    if (asked.drafts.size() > 0 && moody && fresh.contains(asked.id.text()))
      return Reply{}.set(ReplyField::n, 1);
    if (!asked.tokens.empty() || !asked.drafts.empty() || !moody)
      return Reply{}.set(ReplyField::n, asked.n);
    return Reply{}.set(ReplyField::n,
                       static_cast<std::int64_t>(below(static_cast<std::uint64_t>(asked.n) + 1)));
  };
  std::vector<RequestNumber> requests;
  for (int i = 0; i < 12; ++i) {
    requests.push_back(server.arrive(random_request(i, below)));
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

TEST(VllmScheduler, randomRequestsEndAsTheRulesSay) {
  std::set<std::string> seen;
  for (std::uint64_t seed = 0; seed < 300 && !HasFailure(); ++seed)
    seen.merge(play_random_requests(seed).seen);
  for (const char* const verb : {"admit", "extend", "preempt", "step", "complete", "finish",
                                 "abort", "accept", "drafts", "load", "load awaited"})
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
      [](SchedulerEpisode& heard) {
        for (auto& exchange : heard.asked)
          if (exchange.operation.drafts.size() > 1)
            exchange.operation.drafts =
                exchange.operation.drafts.prefix(exchange.operation.drafts.size() - 1);
      },
      [](SchedulerEpisode& heard) {
        for (auto& exchange : heard.asked)
          if (exchange.operation.verb == Verb::accept && exchange.operation.n > 1)
            --exchange.operation.n;
      },
      [](SchedulerEpisode& heard) {  // a row before its load has been settled
        for (auto& exchange : heard.asked)
          if (exchange.operation.verb == Verb::complete)
            exchange.reply = Reply::refusal(Refusal::same_step);
      },
      [](SchedulerEpisode& heard) { heard.notes.clear(); }};
  for (const auto& spoil : spoils) {
    bool noticed = false;
    for (std::uint64_t seed = 0; seed < 60 && !noticed; ++seed)
      noticed = play_random_requests(seed, spoil).finding.has_value();
    EXPECT_TRUE(noticed) << &spoil - spoils;
  }
}

}  // namespace
}  // namespace lockstep::cache_sim
