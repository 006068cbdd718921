// Workloads: each format gives the requests that its file holds, bad files are refused by file,
// line and field, and a stream plays as the same requests in a trace do.
#include "cache_sim/workloads/workload.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <set>
#include <string_view>
#include <tuple>

#include "cache_sim/replay/replay.hpp"
#include "cache_sim/server/simulation.hpp"
#include "properties/support/program.hpp"
#include "properties/support/sanitized.hpp"
#include "reference/base/philox.hpp"

namespace lockstep::cache_sim {
namespace {

using namespace testing_support;

const std::string kRoot = LOCKSTEP_SOURCE_DIR;

std::string fixture(const std::string& name) {
  return kRoot + "/fixtures/workloads/" + name;
}

/// Every request, or the error.
struct Read {
  std::vector<RequestSpec> requests;
  std::string error;
};
Read read_all(const std::string& word, std::int64_t limit = 0) {
  Read read;
  OpenedStream stream = open_workload(word, limit);
  while (stream) {
    RequestSpec spec;
    const Result<bool> more = (*stream)->next(spec);
    if (!more) read.error = more.error().text;
    if (!more || !*more) return read;
    if (!spec.id.exists()) spec.id = Name::intern(fmt::format("r{}", spec.number));
    read.requests.push_back(std::move(spec));
  }
  read.error = stream.error().text;
  return read;
}

std::uint32_t shared_prefix(const RequestSpec& a, const RequestSpec& b) {
  return a.tokens.common(0, b.tokens, 0, std::min(a.prompt_size, b.prompt_size));
}

// --- Formats -------------------------------------------------------------------------------------

TEST(Workloads, mooncakeBlocksAreSharedTokens) {
  const Read read = read_all(fixture("mooncake_conversation_1000.jsonl"));
  ASSERT_EQ(read.error, "");
  ASSERT_EQ(read.requests.size(), 1000u);
  std::int64_t input = 0;
  for (const RequestSpec& request : read.requests) input += request.prompt_size;
  EXPECT_EQ(input, 13'732'944);
  EXPECT_EQ(read.requests[0].prompt_size, 6758u);
  EXPECT_EQ(read.requests[0].output_size(), 500u);
  EXPECT_EQ(read.requests[999].at, 330'000'000'000);
  EXPECT_EQ(shared_prefix(read.requests[0], read.requests[1]), 512u) << "both begin with block 0";
}

TEST(Workloads, bailianTurnsBelongToTheirChat) {
  const Read read = read_all(fixture("qwen_bailian_small.jsonl"));
  ASSERT_EQ(read.error, "");
  ASSERT_EQ(read.requests.size(), 4u);
  EXPECT_EQ(read.requests[0].session, read.requests[2].session);
  EXPECT_EQ(read.requests[3].session, read.requests[2].session);
  EXPECT_NE(read.requests[1].session, read.requests[0].session);
  EXPECT_EQ(read.requests[0].at, 500'000'000);
  EXPECT_EQ(shared_prefix(read.requests[0], read.requests[1]), 32u);
  EXPECT_EQ(shared_prefix(read.requests[2], read.requests[3]), 64u);
}

TEST(Workloads, wekaSubAgentsForkTheSessionAndSessionsNeverMeet) {
  const Read read = read_all(fixture("weka_agentic_small.json"));
  ASSERT_EQ(read.error, "");
  ASSERT_EQ(read.requests.size(), 7u);
  std::map<std::string, std::vector<RequestSpec>> by_session;
  for (const RequestSpec& request : read.requests)
    by_session[request.session.text()].push_back(request);
  const std::vector<RequestSpec>& one = by_session["agent-1"];
  ASSERT_EQ(one.size(), 5u);  // main, main, sub, main, sub in order of arrival
  EXPECT_EQ(shared_prefix(one[1], one[2]), 192u) << "the fork keeps the context";
  EXPECT_EQ(shared_prefix(one[2], one[4]), 256u) << "the sub-agent goes on";
  EXPECT_EQ(shared_prefix(one[1], one[3]), 192u) << "the session goes on without the sub-agent";
  EXPECT_EQ(shared_prefix(one[2], one[3]), 192u);
  EXPECT_EQ(shared_prefix(one[0], by_session["agent-2"][0]), 0u) << "ids are local";
}

TEST(Workloads, llmServingSimIdsAreTheTokens) {
  const Read flat = read_all(fixture("llmservingsim_small.jsonl"));
  ASSERT_EQ(flat.error, "");
  ASSERT_EQ(flat.requests.size(), 3u);
  EXPECT_EQ(flat.requests[0].tokens.text(), "[5,6,7,8,9,10,11,12,13]");
  EXPECT_EQ(flat.requests[0].prompt_size, 6u);
  EXPECT_EQ(flat.requests[1].tokens.common(0, flat.requests[0].tokens, 0, 9), 9u);
  EXPECT_EQ(shared_prefix(flat.requests[0], flat.requests[2]), 0u);
  const Read agentic = read_all(fixture("llmservingsim_agentic_small.jsonl"));
  ASSERT_EQ(agentic.error, "");
  ASSERT_EQ(agentic.requests.size(), 4u);
  EXPECT_EQ(agentic.requests[0].session.text(), "a");
  EXPECT_EQ(agentic.requests[1].session.text(), "b");
  EXPECT_EQ(agentic.requests[3].session.text(), "a");
  EXPECT_EQ(agentic.requests[3].at, 2 * 20'000'000 + 1'000'000) << "two tokens and the tool";
}

// Compressing a file does not change its requests.
TEST(Workloads, zstdFilesGiveTheSameRequests) {
  const Read plain = read_all(fixture("qwen_bailian_small.jsonl"));
  const Read packed = read_all(fixture("qwen_bailian_small.jsonl.zst"));
  ASSERT_EQ(packed.error, "");
  ASSERT_EQ(packed.requests.size(), plain.requests.size());
  for (std::size_t i = 0; i < plain.requests.size(); ++i) {
    EXPECT_EQ(packed.requests[i].tokens, plain.requests[i].tokens);
    EXPECT_EQ(packed.requests[i].at, plain.requests[i].at);
  }
}

TEST(Workloads, everyStreamIsInOrderOfArrival) {
  for (const std::string& word :
       {fixture("mooncake_conversation_1000.jsonl"), fixture("qwen_bailian_small.jsonl"),
        fixture("weka_agentic_small.json"), fixture("llmservingsim_small.jsonl"),
        fixture("llmservingsim_agentic_small.jsonl"), std::string("sglang-w1:requests=50"),
        std::string("sessions:requests=300,fork_every=3")}) {
    const Read read = read_all(word);
    ASSERT_EQ(read.error, "");
    ASSERT_FALSE(read.requests.empty());
    std::set<std::uint32_t> ids;
    for (std::size_t i = 0; i < read.requests.size(); ++i) {
      EXPECT_TRUE(ids.insert(read.requests[i].id.index()).second) << word;
      EXPECT_GE(read.requests[i].output_size(), 1u) << word;
      if (i > 0) {
        EXPECT_GE(read.requests[i].at, read.requests[i - 1].at) << word;
      }
    }
  }
}

// Sessions of one file run side by side, a bounded number at once.
TEST(Workloads, wekaSessionsFollowEachOtherOnTheirSeats) {
  const ScratchFolder folder;
  std::string text;
  for (int i = 0; i < 30; ++i)
    text +=
        fmt::format(R"({{"id": "s{}", "block_size": 64, "hash_id_scope": "local", "requests": [)"
                    R"({{"t": 0, "type": "n", "in": 64, "out": 1, "hash_ids": [1]}},)"
                    R"({{"t": {}, "type": "n", "in": 65, "out": 1, "hash_ids": [1, 2]}}]}})"
                    "\n",
                    i, 1 + i % 7);
  const Read read = read_all(folder.write("many.json", text));
  ASSERT_EQ(read.error, "");
  ASSERT_EQ(read.requests.size(), 60u);
  std::set<std::string> open;
  std::size_t most = 0;
  for (std::size_t i = 0; i < read.requests.size(); ++i) {
    if (i > 0) {
      EXPECT_GE(read.requests[i].at, read.requests[i - 1].at);
    }
    const std::string session = read.requests[i].session.text();
    if (!open.erase(session)) open.insert(session);
    most = std::max(most, open.size());
  }
  EXPECT_LE(most, 9u) << "eight, and the one that begins as another one ends";
  EXPECT_GT(read.requests.back().at, 7'000'000'000);
}

// --- Bad files -----------------------------------------------------------------------------------

struct BadWorkload {
  std::string file;
  std::string says;  ///< after the file's path
};
void PrintTo(const BadWorkload& bad, std::ostream* out) {
  *out << bad.file;
}

const std::vector<BadWorkload> kBad = {
    {"bailian_chat_twice.jsonl", ":2: field chat_id: 1 stands in an earlier line"},
    {"bailian_ids_contradict_length.jsonl", ":2: field hash_ids: 2 ids for 50 tokens"},
    {"bailian_parent_is_unknown.jsonl", ":2: field parent_chat_id: no line before this one"},
    {"bailian_time_backwards.jsonl", ":2: field timestamp: is before that of an earlier line"},
    {"garbage.zst", ": is not whole zstd data"},
    {"llmservingsim_id_past_32_bits.jsonl", ":2: field input_tok_ids[1]: 4294967296 is above"},
    {"llmservingsim_ids_contradict_length.jsonl", ":2: field input_tok_ids: 2 ids for 3 tokens"},
    {"llmservingsim_session_twice.jsonl", ":3: field session_id: an earlier session"},
    {"llmservingsim_sub_request_is_a_number.jsonl", ":2: field sub_requests[1]: a number, not an"},
    {"llmservingsim_sub_requests_without_session.jsonl", ":2: field session_id: is missing"},
    {"llmservingsim_time_backwards.jsonl", ":2: field arrival_time_ns: is before that"},
    {"llmservingsim_times_overflow.jsonl",
     ":2: field sub_requests[1].tool_duration_ns: counted from 4"},
    {"mooncake_field_missing.jsonl", ":2: field output_length: is missing"},
    {"mooncake_field_twice.jsonl", ":2: field input_length stands twice"},
    {"mooncake_id_with_a_fraction.jsonl", ":2: field hash_ids[1]: a number with a fraction"},
    {"mooncake_id_with_two_parents.jsonl", ":2: field hash_ids: block 2 follows block 3 here"},
    {"mooncake_ids_contradict_length.jsonl", ":2: field hash_ids: 3 ids for 600 tokens"},
    {"mooncake_length_is_text.jsonl", ":2: field input_length: a string, not a whole number"},
    {"mooncake_length_negative.jsonl", ":2: field input_length: -3 is below 1"},
    {"mooncake_time_backwards.jsonl", ":2: field timestamp: is before that of an earlier line"},
    {"mooncake_time_negative.jsonl", ":2: field timestamp: -1 is below 0"},
    {"not_an_object.jsonl", ":2: here a JSON object begins, and not `[`"},
    {"not_json.jsonl", ":2: is not JSON at its byte"},
    {"number_too_large.jsonl", ":2: holds a number that no machine holds"},
    {"truncated.jsonl", ":2: the file ends inside this document"},
    {"truncated.jsonl.zst", ": the zstd data end early"},
    {"unknown_format.jsonl", ":1: its fields are those of no known workload"},
    {"weka_block_size_changes.json", ":2: field block_size: 32 here and 64 before"},
    {"weka_ids_are_text.json", ":2: field requests[0].hash_ids: a string, not an array"},
    {"weka_ids_contradict_length.json", ":2: field requests[0].hash_ids: 3 ids for 64 tokens"},
    {"weka_scope_unknown.json", ":2: field hash_id_scope: `global` is not `local`"},
    {"weka_session_twice.json", ":2: field id: an earlier session is called `a`"},
    {"weka_subagent_before_its_parent.json", ":2: field requests[1].requests[0].t: is before"},
    {"weka_subagent_without_requests.json", ":2: field requests[0].requests: is missing"},
    {"weka_type_unknown.json", ":2: field requests[0].type: `x` is none of n, s, subagent"},
};

class BadWorkloadFile : public testing::TestWithParam<BadWorkload> {};

TEST_P(BadWorkloadFile, isRefusedByFileLineAndField) {
  const std::string path = kRoot + "/fixtures/bad/workloads/" + GetParam().file;
  const std::string error = read_all(path).error;
  EXPECT_EQ(error.substr(0, path.size() + GetParam().says.size()), path + GetParam().says);
}

INSTANTIATE_TEST_SUITE_P(Workloads, BadWorkloadFile, testing::ValuesIn(kBad), [](const auto& info) {
  std::string name = info.param.file;
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  return name;
});

TEST(Workloads, everyBadFileIsInTheList) {
  std::set<std::string> listed;
  for (const BadWorkload& bad : kBad) listed.insert(bad.file);
  for (const auto& entry : std::filesystem::directory_iterator(kRoot + "/fixtures/bad/workloads"))
    EXPECT_TRUE(listed.contains(entry.path().filename().string())) << entry.path();
}

// Documents of a few bytes a level or a value: what they take is bounded before they are read.
TEST(Workloads, documentsThatWouldFillTheMemoryAreRefused) {
  const ScratchFolder folder;
  const std::string path = folder.path("hostile.json");
  std::string nested = R"({"block_size": 64, "hash_id_scope": "local", "id": "a", "requests": [)";
  std::string end = "]}";
  for (int level = 0; level < 20'000; ++level) {
    nested += R"({"t": 0, "type": "subagent", "requests": [)";
    end += "]}";
  }
  EXPECT_EQ(read_all(folder.write("hostile.json", nested + end)).error,
            path + ":1: the document is nested deeper than 100 levels");
  EXPECT_EQ(read_all(folder.write("hostile.json", "{" + std::string(300'000, '['))).error,
            path + ":1: the document is nested deeper than 100 levels");
  std::string values = R"({"timestamp": 0, "hash_ids": [)";
  for (int i = 0; i < 21'000'000; ++i) values += "0,";
  EXPECT_EQ(read_all(folder.write("hostile.json", values)).error,
            path + ":1: the document holds more than 20000000 values");
}

// Moments are 64 bits of nanoseconds: what would pass them is refused, not wrapped into the past.
TEST(Workloads, sessionsThatFollowEachOtherForCenturiesAreRefused) {
  const ScratchFolder folder;
  std::string text;
  for (int i = 0; i < 20; ++i)
    text +=
        fmt::format(R"({{"id": "s{}", "block_size": 64, "hash_id_scope": "local", "requests": [)"
                    R"({{"t": 4000000000, "type": "n", "in": 64, "out": 1, "hash_ids": [1]}}]}})"
                    "\n",
                    i);
  const std::string path = folder.write("long.json", text);
  EXPECT_EQ(read_all(path).error,
            path +
                ":9: field requests[0].t: counted from 4000000000s, it is later than 2^62 ns, "
                "which is 146 years");
  EXPECT_NE(read_all("sessions:requests=100000000,gap_us=1000000000").error.find("146 years"),
            std::string::npos);
}

// An error that shows only in the middle of a replay writes nothing either.
TEST(Workloads, theProgramRefusesABadFileAndWritesNothing) {
  const ScratchFolder folder;
  for (const char* const command : {"replay", "compare"}) {
    std::vector<std::string> words{command, "fixtures/bad/workloads/mooncake_time_backwards.jsonl",
                                   "--json", folder.path("out.json")};
    if (std::string(command) == "compare") words.insert(words.end(), {"--policies", "kv-bound"});
    const ProgramRun run = run_program(words);
    EXPECT_EQ(run.status, kExitBadInput);
    EXPECT_EQ(run.out, "");
    EXPECT_EQ(lines_of(run.err).size(), 1u) << run.err;
    EXPECT_TRUE(folder.entries().empty());
  }
}

TEST(Workloads, parametersAreRefusedByName) {
  EXPECT_EQ(read_all("sessions:turn=3").error, "sessions:turn=3: sessions has no parameter `turn`");
  EXPECT_NE(read_all("sessions:turns=0").error.find("parameter turns: 0 is below 1"),
            std::string::npos);
  EXPECT_NE(read_all("sessions:turns=4096,input=1048576").error.find("2^24"), std::string::npos);
}

// --- Generated sessions --------------------------------------------------------------------------

// Each turn's prompt is the one before it, its answer, and something new.
TEST(Sessions, aTurnContinuesTheOneBeforeIt) {
  const Read read = read_all("sessions:requests=400,seats=5,turns=6");
  std::map<std::string, const RequestSpec*> last;
  std::map<std::string, int> turns;
  for (const RequestSpec& request : read.requests) {
    const std::string session = request.session.text();
    if (const RequestSpec* const before = last[session]) {
      ASSERT_GT(request.prompt_size, before->tokens.size());
      EXPECT_EQ(request.tokens.common(0, before->tokens, 0, before->tokens.size()),
                before->tokens.size());
    }
    last[session] = &request;
    EXPECT_LE(++turns[session], 6);
  }
  EXPECT_GT(turns.size(), 60u);
}

// A sub-agent shares the context up to its fork, and the session goes on without its tokens.
TEST(Sessions, agentsForkAndComeBack) {
  const Read read =
      read_all("sessions:requests=14,seats=1,turns=14,fork_every=4,fork_turns=3,systems=1");
  ASSERT_EQ(read.requests.size(), 14u);
  const auto covers = [&](std::size_t later, std::size_t earlier) {
    const RequestSpec& before = read.requests[earlier];
    return shared_prefix(read.requests[later], read.requests[later]) >= before.tokens.size() &&
           read.requests[later].tokens.common(0, before.tokens, 0, before.tokens.size()) ==
               before.tokens.size();
  };
  for (const std::size_t fork : {4u, 11u}) {
    EXPECT_TRUE(covers(fork, fork - 1)) << "it begins with what the session has";
    EXPECT_TRUE(covers(fork + 1, fork));
    EXPECT_TRUE(covers(fork + 2, fork + 1));
  }
  EXPECT_TRUE(covers(7, 3)) << "the session goes on";
  EXPECT_EQ(shared_prefix(read.requests[7], read.requests[6]), read.requests[3].tokens.size());
  EXPECT_EQ(shared_prefix(read.requests[11], read.requests[4]), read.requests[3].tokens.size());
}

// A request depends on the seed and its number alone, so a longer workload begins as a shorter one.
TEST(Sessions, areAFunctionOfSeedAndNumber) {
  const Read few = read_all("sessions:requests=100,fork_every=2");
  const Read many = read_all("sessions:requests=500,fork_every=2", 100);
  const Read other = read_all("sessions:requests=100,fork_every=2,seed=2");
  ASSERT_EQ(many.requests.size(), 100u);
  int different = 0;
  for (std::size_t i = 0; i < 100; ++i) {
    EXPECT_EQ(few.requests[i].tokens, many.requests[i].tokens);
    EXPECT_EQ(few.requests[i].at, many.requests[i].at);
    different += few.requests[i].prompt_size != other.requests[i].prompt_size ? 1 : 0;
  }
  EXPECT_GT(different, 90);
}

// --- Playing a stream ----------------------------------------------------------------------------

std::unique_ptr<ReplaySession> started(const std::string& config) {
  RunOptions options;
  options.subjects = {"sglang-no-buffer", "oracle:sglang-no-buffer"};
  require(options.config.set_all(config).has_value(), "the config is good");
  return std::move(*ReplaySession::start(options));
}

// The stream holds one request ahead, a trace all of them; who is served when is the same.
TEST(StreamedWorkload, playsAsTheSameRequestsInATraceDo) {
  const std::string config = "kv_tokens=9000,state_slots=14,max_running=5,chunked_prefill=700";
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    const std::string word = fmt::format(
        "sessions:requests=60,seats=6,turns=4,system=300,input=80,output=12,seed={},gap_us={}",
        seed, 500 + random_below(9000, seed, 1, 0));
    Trace trace;
    trace.scheduler_level = true;
    for (RequestSpec& spec : read_all(word).requests) trace.statements.push_back({0, spec, {}, 0});
    trace.statements.push_back({0, RunStatement{}, {}, 0});
    const auto whole = started(config);
    play_trace(*whole, trace);
    const auto streamed = started(config);
    const OpenedStream stream = open_workload(word);
    ASSERT_TRUE(Simulation(*streamed).play(**stream));
    ASSERT_TRUE(streamed->findings().empty()) << streamed->findings()[0].finding.text;
    EXPECT_EQ(streamed->digest(), whole->digest()) << word;
    ASSERT_EQ(streamed->outcomes().size(), 60u);
    for (const RequestOutcome& outcome : streamed->outcomes()) {
      const RequestOutcome& same = *whole->find_outcome(outcome.id);
      EXPECT_EQ(outcome.end, same.end);
      EXPECT_EQ(outcome.first_token, same.first_token);
      EXPECT_EQ(outcome.cached_tokens, same.cached_tokens);
      EXPECT_GE(outcome.first_token, outcome.arrival);
    }
  }
}

// A run that hands its requests out as they end, and takes their names again, goes as one that
// keeps them.
TEST(StreamedWorkload, endsItsRequestsAsARunThatForgetsThem) {
  for (const char* const subject : {"radix", "sglang-no-buffer", "vllm-align", "edge-llm"}) {
    ReplayRequest request;
    request.file = "sessions:requests=400,gap_us=9000,system=200,input=60,output=20,turns=4";
    request.subjects = {subject};
    request.check = CheckLevel::off;
    if (std::string_view(subject) == "vllm-align") request.config = "scheduler=vllm";
    const Result<ReplayOutcome> kept = replay(request);
    ASSERT_TRUE(kept) << kept.error().text;
    std::map<Nanoseconds, RequestOutcome> forgotten;
    std::set<std::uint32_t> names;
    request.ended = [&](const RequestOutcome& outcome) {
      EXPECT_TRUE(forgotten.emplace(outcome.arrival, outcome).second);
      names.insert(outcome.id.index());
    };
    const Result<ReplayOutcome> run = replay(request);
    ASSERT_TRUE(run) << run.error().text;
    EXPECT_TRUE(run->run->outcomes().empty());
    EXPECT_EQ(run->run->totals(0).evicted_kv, kept->run->totals(0).evicted_kv);
    ASSERT_EQ(forgotten.size(), 400u);
    EXPECT_LT(names.size(), 200u) << subject;
    for (const RequestOutcome& outcome : kept->run->outcomes()) {
      const RequestOutcome& same = forgotten.at(outcome.arrival);
      EXPECT_EQ(std::tie(same.prompt_tokens, same.cached_tokens, same.output_tokens, same.finish,
                         same.first_token, same.end),
                std::tie(outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens,
                         outcome.finish, outcome.first_token, outcome.end))
          << subject;
    }
  }
}

/// The most memory that a command takes for so many requests of sessions.
long peak_kib(const std::string& command, const std::string& requests,
              const std::vector<std::string>& more) {
  std::vector<std::string> words = {command, "sessions:output=4,gap_us=20000,requests=" + requests};
  words.insert(words.end(), more.begin(), more.end());
  const ProgramRun run = run_program(words);
  EXPECT_EQ(run.status, kExitPass) << run.err;
  return run.peak_kib;
}

// Ended requests are not held: a long workload takes little more memory than a short one.
TEST(StreamedWorkload, memoryDoesNotGrowWithTheTokens) {
  if (testing_support::kSanitized) GTEST_SKIP() << "a sanitizer keeps what is freed for a while";
  const std::vector<std::string> words = {"--subject", "sglang-no-buffer", "--check", "off"};
  const long few = peak_kib("replay", "2000", words);
  const long many = peak_kib("replay", "22000", words);  // 30 million tokens more
  EXPECT_LT(many - few, 30'000) << "1.5 KiB a request is what a ledger may take";
}

// Of a comparison two times and the digests of its states are left of a request.
TEST(StreamedWorkload, aComparisonForgetsItsRequests) {
  if (testing_support::kSanitized) GTEST_SKIP() << "a sanitizer keeps what is freed for a while";
  const std::vector<std::string> words = {"--policies", "sglang-no-buffer", "--capacity", "4GiB"};
  EXPECT_LT(peak_kib("compare", "42000", words) - peak_kib("compare", "2000", words), 8'000)
      << "0.2 KiB a request";
}

// The name of a file does not tell its format, its content does.
TEST(Workloads, areToldFromTracesByTheirContent) {
  const ScratchFolder folder;
  EXPECT_TRUE(is_workload_file(fixture("weka_agentic_small.json")));
  EXPECT_TRUE(is_workload_file(fixture("qwen_bailian_small.jsonl.zst")));
  EXPECT_TRUE(is_workload_file(folder.write("x.trace", " \n {\"a\": 1}\n")));
  EXPECT_FALSE(is_workload_file(folder.write("y.jsonl", "check\n")));
  EXPECT_FALSE(is_workload_file(folder.write("empty.jsonl", "")));
  EXPECT_FALSE(is_workload_file(folder.path("missing")));
}

}  // namespace
}  // namespace lockstep::cache_sim
