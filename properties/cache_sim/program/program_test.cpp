// The built program: bad input is refused with one sentence and writes nothing, and the files of a
// run are complete and the same each time.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

#include "properties/support/program.hpp"
#include "properties/support/sanitized.hpp"
#include "reference/base/finding.hpp"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;
using namespace testing_support;

// --- Bad input -----------------------------------------------------------------------------------

/// The line where the file is wrong, and the words that the sentence must have.
struct BadFile {
  std::string name;
  std::string content;
  std::string says;  ///< after the file's path: `:line: …` or what the sentence contains
  std::vector<std::string> words = {};
};
void PrintTo(const BadFile& file, std::ostream* out) {
  *out << file.name;
}

void expect_refused(const ScratchFolder& folder, std::vector<std::string> words,
                    const std::string& says, int status = kExitBadInput) {
  const std::vector<std::string> before = folder.entries();
  for (const char* const option : {"json", "timeline", "decisions"}) {
    words.push_back(std::string("--") + option);
    words.push_back(folder.path(std::string("written.") + option));
  }
  const ProgramRun run = run_program(words);
  EXPECT_EQ(run.status, status) << run.err;
  EXPECT_EQ(run.out, "");
  ASSERT_EQ(lines_of(run.err).size(), 1u) << run.err;
  EXPECT_NE(run.err.find(says), std::string::npos) << "`" << says << "` is not in " << run.err;
  EXPECT_LT(run.err.size(), 600u) << "one sentence does not quote everything";
  EXPECT_EQ(folder.entries(), before) << "bad input writes nothing";
}

class BadInput : public testing::TestWithParam<BadFile> {};

TEST_P(BadInput, isRefusedWithOneSentenceAndNothingIsWritten) {
  const ScratchFolder folder;
  const std::string file = folder.write("bad.trace", GetParam().content);
  std::vector<std::string> words{"replay", file};
  words.insert(words.end(), GetParam().words.begin(), GetParam().words.end());
  const bool located = GetParam().says.front() == ':';
  expect_refused(folder, words, located ? file + GetParam().says : GetParam().says);
}

std::string repeated(const std::string& piece, std::size_t times) {
  std::string text;
  for (std::size_t i = 0; i < times; ++i) text += piece;
  return text;
}

const std::string kGood = "admit id=r tokens=a8\n";

// NOLINTNEXTLINE(readability-function-size): a table
std::vector<BadFile> bad_files() {
  const std::string requests = "request id=r tokens=a8 output=1 at=5ms\n";
  // Every known token is computed: these drafts verify nothing that was sampled.
  const std::string after_nothing = kGood + "extend id=r n=8\nextend id=r n=1 drafts=b1\n";
  return {
      {"unknown_verb", "check\nadmitt id=r tokens=a8\n",
       ":2: unknown verb `admitt`, but `admit` is one"},
      {"verb_like_no_other", "check\nregret id=r\n", ":2: unknown verb `regret`\n"},
      {"mistyped_verb_of_requests", "reqeust id=r tokens=a8 output=1\n",
       ":1: unknown verb `reqeust`, but `request` is one"},
      {"unknown_field", "admit id=r tokens=a8 token=a8\n",
       ":1: admit has no field `token`, but `tokens` is one"},
      {"unknown_field_of_a_request", "request id=r tokens=a8 output=1 out=2\n", ":1: field out"},
      {"unknown_field_of_an_answer", "check\n----\nkv_left=3\n", ":3: no answer has a field `kv_"},
      {"missing_field", "extend id=r\n", ":1: extend needs the field n"},
      {"field_without_value", "admit id= tokens=a8\n", ":1: field id: is empty"},
      {"field_without_equals", "admit r tokens=a8\n", ":1: `r` is not a field key=value"},
      {"field_that_stands_twice", "admit id=r id=s tokens=a8\n", ":1: field id stands twice"},
      {"answer_field_that_stands_twice", kGood + "----\ncached=0 cached=1\n",
       ":3: field cached stands twice"},
      {"token_term_without_number", "admit id=r tokens=a\n", ":1: field tokens: token term `a`"},
      {"token_term_without_document", "admit id=r tokens=8\n", ":1: field tokens: token term `8`"},
      {"token_term_in_capitals", "admit id=r tokens=A8\n", ":1: field tokens: token term `A8`"},
      {"empty_token_term", "admit id=r tokens=a8++b8\n", ":1: field tokens: a token term is empty"},
      {"open_list", "admit id=r tokens=[1,2\n", ":1: field tokens: token term `[1,2`"},
      {"list_with_a_hole", "admit id=r tokens=[1,,2]\n", ":1: field tokens: token term `[1,,2]`"},
      {"negative_token", "admit id=r tokens=[-1]\n", ":1: field tokens: token term `[-1]`"},
      {"negative_document_size", "admit id=r tokens=a-8\n", ":1: field tokens: token term `a-8`"},
      {"token_past_32_bits", "admit id=r tokens=[4294967296]\n", ":1: field tokens: token term"},
      {"reversed_slice", "admit id=r tokens=a9:8\n",
       ":1: field tokens: token term `a9:8` is a rev"},
      {"too_many_tokens", "admit id=r tokens=a16777217\n", ":1: field tokens: token term"},
      {"too_many_tokens_in_all", "admit id=r tokens=a16777216+b1\n", ":1: field tokens: "},
      {"negative_size", kGood + "extend id=r n=-1\n", ":2: field n: -1 is below 1"},
      {"negative_eviction", "evict kv=-3\n", ":1: field kv: -3 is below 0"},
      {"negative_output", "request id=r tokens=a8 output=-1\nrun\n", ":1: field output: -1"},
      {"negative_config", "config kv_tokens=-1\ncheck\n", ":1: field kv_tokens: -1 is below 1"},
      {"second_request_with_this_id",
       "request id=r tokens=a8 output=1\nrequest id=r tokens=b8 output=1\nrun\n", ":2: field id: "},
      {"second_admission_with_this_id", kGood + kGood, ":2: field id: request `r` is admitted"},
      {"request_that_is_not_there", "finish id=r\n", ":1: field id: no admitted request"},
      {"drafts_after_nothing_for_edge_llm",
       after_nothing,
       ":3: extend: ",
       {"--subject", "edge-llm"}},
      {"drafts_after_nothing_for_edge_llms_oracle",
       after_nothing,
       ":3: extend: ",
       {"--subject", "oracle:edge-llm"}},
      {"drafts_after_nothing_for_static_kv",
       after_nothing,
       ":3: extend: ",
       {"--subject", "static-kv"}},
      {"drafts_after_nothing_for_static_kvs_oracle",
       after_nothing,
       ":3: extend: ",
       {"--subject", "oracle:static-kv"}},
      {"request_that_has_ended", kGood + "abort id=r\nfinish id=r\n", ":3: field id: no admitted"},
      {"expectation_of_nobody", requests + "run\nexpect id=s\n", ":3: field id: no request"},
      {"abort_of_nobody", requests + "abort id=s\nrun\n", ":2: field id: no request"},
      {"time_that_goes_backwards", requests + "request id=s tokens=a8 output=1 at=4999us\nrun\n",
       ":2: field at: 4999us is before 5ms"},
      {"run_until_the_past", requests + "run until=6ms\nrun until=1ms\n",
       ":3: field until: 1ms is before 6ms"},
      {"time_without_unit", "request id=r tokens=a8 output=1 at=5\nrun\n", ":1: field at: `5`"},
      {"number_past_64_bits", kGood + "extend id=r n=9223372036854775808\n",
       ":2: field n: `9223372036854775808` does not fit 64 bits"},
      {"time_past_64_bits", "request id=r tokens=a8 output=1 at=9223372037s\nrun\n",
       ":1: field at: "},
      {"number_with_a_tail", kGood + "extend id=r n=8x\n", ":2: field n: `8x`"},
      {"accepts_without_drafts", "request id=r tokens=a8 output=4 accept=2\nrun\n", ":1: accept"},
      {"accepts_more_than_drafted", "request id=r tokens=a8 output=4 accept=3 drafts=1\nrun\n",
       ":1: field accept"},
      {"answer_without_a_verb", "----\ncached=0\n", ":1: ---- stands after a verb"},
      {"second_answer", kGood + "----\ncached=0\n----\ncached=0\n", ":4: ---- stands after a"},
      {"answer_that_is_missing", kGood + "----\n", ":2: the file ends where the answer"},
      {"config_behind_an_operation", "check\nconfig page=1\n", ":2: config stands before"},
      {"config_without_such_a_field", "config kv_token=8\ncheck\n",
       ":1: config has no field `kv_token`, but `kv_tokens` is one"},
      {"admission_among_requests", requests + "admit id=s tokens=a8\nrun\n", ":2: admit cannot"},
      {"run_without_requests", kGood + "run\n", ":2: run is for files with request lines"},
      {"empty_file", "", ": the file is empty"},
      {"file_of_comments", "# nothing\n\n", ": the file holds no operation"},
      {"truncated_file", "check\nadmit id=r tok", ":2: `tok` is not a field key=value"},
      {"file_of_zeros", std::string(4096, '\0'), ":1: "},
      {"binary_file",
       std::string("\x7f"
                   "ELF\x02\x01\x01\0\0\n\xff\xfe\x80",
                   13),
       ":1: "},
      {"binary_comment", "# \x01\ncheck\n", ":1: the control character"},
      {"windows_file", "check\r\n", ":1: the line ends with a carriage return"},
      {"field_of_no_verb", "step x=1\n", ":1: step has no field `x`"},
      {"finds_without_run", "# finds: leak\ncheck\n", ":1: # finds: stands after"},
      {"finds_of_no_kind", "# run: lockstep replay %s\n# finds: bug\ncheck\n",
       ":2: # finds: `bug`"},
      {"byte_order_mark",
       "\xEF\xBB\xBF"
       "check\n",
       ": begins with a byte order mark"},
      {"gzip", "\x1F\x8B\x08", ": is compressed with gzip"},
      {"steps_that_pass_the_clock",
       "config policy=radix step_time=5000000000s\nrequest id=r tokens=a8 output=4\nrun\n",
       ":3: a step of 5000000000s that begins at 5000000000s ends after the last moment"},
      {"no_kv", "config kv_tokens=0\ncheck\n", ":1: field kv_tokens: 0 is below 1"},
      {"no_state_slots", "config state_slots=0\ncheck\n", ":1: field state_slots: "},
      {"less_kv_than_a_page", "config policy=radix kv_tokens=15 page=16\ncheck\n",
       ":1: field kv_tokens: 15 is less"},
      {"unknown_policy", "config policy=sglang\ncheck\n", ":1: field policy: there is no"},
      {"config_field_on_two_lines", "config page=1\nconfig kv_tokens=8 page=1\ncheck\n",
       ":2: field page: line 1 sets it, too"},
      {"field_that_the_policy_ignores", "config kv_tokens=32\nconfig page=16\ncheck\n",
       ":2: policy sglang-no-buffer does not use the config field page"},
      {"verb_that_the_policy_ignores", kGood + "capture id=r as=c\n", ":2: capture"},
      {"ranks_without_disks", "config host_kv=8 host_states=2 storage_ranks=2\ncheck\n",
       ":1: field storage_ranks: it has no effect without disk="},
      {"window_pool_without_windows", "config kv_tokens=8\nconfig window_kv=8\ncheck\n",
       ":2: field window_kv: it has no effect without window="},
      {"host_windows_without_windows", "config host_kv=8 host_states=2 host_window_kv=8\ncheck\n",
       ":1: field host_window_kv: it has no effect without window="},
      {"write_policy_without_a_host", "config write_policy=write_back\ncheck\n",
       ":1: field write_policy: it has no effect without host_kv="},
      {"prefetches_without_a_disk", "config host_kv=8 host_states=2 prefetch_least=4\ncheck\n",
       ":1: field prefetch_least: it has no effect without disk="},
      {"interval_of_no_ring", "config track_interval=8\ncheck\n",
       ":1: field track_interval: it has no effect without replay_ring="},
      {"bootstrap_of_a_fixed_alpha", "config policy=marconi alpha=500 bootstrap=3\ncheck\n",
       ":1: field bootstrap: it has no effect beside alpha="},
      {"routing_of_one_rank", "config policy=radix\nconfig routing=prefix\ncheck\n",
       ":2: field routing: it has no effect without ranks="},
      {"offload_without_blocks_on_the_host", "config policy=vllm-align lazy_offload=1\ncheck\n",
       ":1: field lazy_offload: it has no effect without cpu_blocks="},
      {"option_of_the_scheduler_that_stands_twice",
       "config policy=vllm-align scheduler=vllm:long_prefill=4:long_prefill=8\ncheck\n",
       ":1: field scheduler: option long_prefill stands twice"},
      {"index_keys_on_a_disk", "config disk=1 host_kv=8 host_states=2 index_keys=1\ncheck\n",
       ":1: field index_keys: index keys are not in the storage of disk=1"},
      {"rank_that_there_is_not", "config disk=1 host_kv=8 host_states=2\nfail rank=1 tier=disk\n",
       ":2: fail: rank=1 is beyond the 1 rank"},
      {"draft_model_of_nobody", "config draft_model=prefill policy=sglang-pd\ncheck\n",
       ":1: field draft_model: `prefill` is none of none, both, decode"},
      {"requests_to_two_servers", "config policy=sglang-pd\nrequest id=r output=1 tokens=a8\nrun\n",
       ":2: policy sglang-pd: no scheduler moves requests from one server to the other"},
      {"chunks_that_the_scheduler_takes_for_computed",
       "config policy=vllm-align\nrequest id=r output=1 tokens=a600\nrun\n",
       ":3: policy vllm-align computes 512 of 600 tokens of `r`, and scheduler plain takes all"},
      {"copy_of_a_request_of_one_server",
       "config host_kv=8 host_states=2\nadmit id=r tokens=a8\nland id=r tier=host\n",
       ":3: land: sglang-no-buffer takes no field id: it is one server"},
      {"more_tokens_than_there_are", kGood + "extend id=r n=9\n", ":2: extend: n=9"},
      {"state_of_a_policy_without_states", "config policy=radix\nalloc as=s\n", ":2: alloc: radix"},
      {"unknown_subject", kGood, "no subject `nobody`", {"--subject", "nobody"}},
      {"unknown_oracle", kGood, "no subject `oracle:nobody`", {"--subject", "oracle:nobody"}},
      {"unknown_defect", kGood, "no defect `nobody:nothing`", {"--defect", "nobody:nothing"}},
      {"defect_of_another_subject",
       kGood,
       "needs the subject radix",
       {"--subject", "sglang-no-buffer", "--defect", "radix:match-forgets-time"}},
      {"unknown_option_field",
       kGood,
       "--config: config has no field `pages`",
       {"--config", "pages=1"}},
      {"option_that_is_no_field",
       kGood,
       "--config: `pages` is not key=value",
       {"--config", "pages"}},
      {"option_without_kv", kGood, "--config: field kv_tokens", {"--config", "kv_tokens=0"}},
      {"option_over_the_files_field",
       "config kv_tokens=32\ncheck\n",
       ": field kv_tokens: 8 is less than one page",
       {"--config", "kv_tokens=8,page=16,policy=radix"}},
      {"option_that_the_policy_ignores",
       kGood,
       "does not use the config field page",
       {"--config", "page=4"}},
      {"unknown_fidelity", kGood, "field fidelity: there is no `real`", {"--fidelity", "real"}},
      {"timeout_without_unit", kGood, "--timeout: `5`", {"--timeout", "5"}},
      {"timeout_of_nothing", kGood, "--timeout: `0ms` leaves no time", {"--timeout", "0ms"}},
      {"child_without_a_command", kGood, "`exec: ` names no command", {"--subject", "exec: "}},
  };
}

INSTANTIATE_TEST_SUITE_P(Files, BadInput, testing::ValuesIn(bad_files()),
                         [](const testing::TestParamInfo<BadFile>& info) {
                           return info.param.name;
                         });

// Not in the table, which every test of this program makes when it starts.
TEST(BadInputOfTheProgram, aLinePast1MiBIsRefused) {
  const ScratchFolder folder;
  const std::string file = folder.write("bad.trace", "check\n# " + repeated("x", 1 << 20) + "\n");
  expect_refused(folder, {"replay", file}, file + ":2: the line is longer");
}

TEST(BadInputOfTheProgram, filesAndWorkloadsThatCannotBeReadAreNamed) {
  const ScratchFolder folder;
  expect_refused(folder, {"replay", folder.path("absent.trace")}, folder.path("absent.trace"));
  expect_refused(folder, {"replay", folder.path("")}, folder.path(""));
  expect_refused(folder, {"replay", "sglang-w1:request=5"}, "sglang-w1:request=5: ");
  expect_refused(folder, {"replay", "sglang-w1:requests=-5"}, "sglang-w1:requests=-5: ");
  expect_refused(folder, {"replay", "sglang-w1:state_slots=0,requests=5"}, "state_slots");
}

// Editors leave the last line without a newline.
TEST(Program, readsATraceWithoutItsLastNewline) {
  const ScratchFolder folder;
  for (const std::string text : {"admit id=r tokens=a8", "admit id=r tokens=a8\n----\ncached=0"}) {
    const ProgramRun run = run_program({"replay", folder.write("x.trace", text)});
    EXPECT_EQ(run.status, kExitPass) << run.err;
    EXPECT_NE(run.out.find("1 event,"), std::string::npos) << run.out;
  }
}

// Commands in Python are refused with our sentence where the package is missing, not with Python's
// error.
TEST(BadInputOfTheProgram, nightlyWithoutThePythonPackageIsASentence) {
  const ScratchFolder folder;
  const ScratchFolder empty;
  const char* const before = std::getenv("PYTHONPATH");
  const std::string kept = before == nullptr ? "" : before;
  ::setenv("PYTHONPATH", empty.path("").c_str(), 1);
  const ProgramRun run = run_program({"nightly", "--help"});
  ::setenv("PYTHONPATH", kept.c_str(), 1);
  if (run.err.empty()) GTEST_SKIP() << "this machine's python3 has the package";
  EXPECT_EQ(run.status, kExitEnvironment) << run.err;
  EXPECT_EQ(run.err,
            "lockstep: `nightly` is in Python, and python3 finds no package `lockstep`: `pip "
            "install .` in a checkout brings it\n");
}

// A search ends with the first of both that is reached.
TEST(Program, aSearchTakesTracesAndTimeTogether) {
  const ScratchFolder folder;
  const ProgramRun run = run_program({"explore", "--subject", "radix", "--traces", "3", "--time",
                                      "600s", "--out", folder.path("f")});
  EXPECT_EQ(run.status, kExitPass) << run.err;
  EXPECT_NE(run.out.find("3 traces,"), std::string::npos) << run.out;
  EXPECT_EQ(run_program({"explore", "--subject", "radix", "--traces", "1000000000", "--time", "1ms",
                         "--out", folder.path("f")})
                .status,
            kExitPass);
}

// One bad file among good ones: the good ones are not reported either.
TEST(BadInputOfTheProgram, oneBadFileOfSeveralWritesNothing) {
  const ScratchFolder folder;
  const std::string good = folder.write("good.trace", kGood);
  const std::string bad = folder.write("bad.trace", "nonsense\n");
  expect_refused(folder, {"replay", good, bad}, bad + ":1: ");
}

// A log that was given by mistake must not be read to its end, nor into memory.
TEST(BadInputOfTheProgram, aLineOf100MegabytesIsRefusedAtOnce) {
  const ScratchFolder folder;
  const std::string file =
      folder.write("long.trace", "admit id=r tokens=[" + repeated("1,", 50'000'000) + "1]\n");
  const ProgramRun run = run_program({"replay", file, "--json", folder.path("j")});
  EXPECT_EQ(run.status, kExitBadInput);
  EXPECT_EQ(run.out, "");
  EXPECT_EQ(run.err, "lockstep: " + file + ":1: the line is longer than 1 MiB\n");
  EXPECT_EQ(folder.entries(), std::vector<std::string>{"long.trace"});
  EXPECT_LT(run.cpu_s, 1.0);
  if (!testing_support::kSanitized) {
    // A program begins as a copy of the process that starts it, which counts as its memory.
    const long copied = run_program({"--version"}).peak_kib;
    EXPECT_LT(run.peak_kib, std::max(30L * 1024, copied) + 10L * 1024);
  }
}

TEST(BadInputOfTheProgram, wrongWordsOnTheCommandLineAreExit2) {
  const std::vector<std::vector<std::string>> mistakes = {
      {},
      {"reply"},
      {"replay"},
      {"list"},
      {"list", "everything"},
      {"replay", "x.trace", "--chek", "off"},
      {"replay", "x.trace", "--check", "some"},
      {"replay", "x.trace", "--json"},
  };
  for (const std::vector<std::string>& words : mistakes) {
    SCOPED_TRACE(testing::PrintToString(words));
    const ProgramRun run = run_program(words);
    EXPECT_EQ(run.status, kExitBadInput);
    EXPECT_EQ(run.out, "");
    EXPECT_TRUE(run.err.starts_with("lockstep: ")) << run.err;
    EXPECT_EQ(lines_of(run.err).size(), 1u) << run.err;
  }
  EXPECT_EQ(run_program({"reply"}).err,
            "lockstep: there is no command `reply`, but `replay` is one; `lockstep --help` shows "
            "all\n");
  EXPECT_EQ(run_program({"unheard-of"}).err,
            "lockstep: there is no command `unheard-of`; `lockstep --help` shows all\n");
  EXPECT_EQ(run_program({}).err, "lockstep: no command is named; `lockstep --help` shows all\n");
  EXPECT_EQ(run_program({"replay", "x.trace", "--chek", "off"}).err,
            "lockstep: lockstep replay has no option `--chek`, but `--check` is one; `lockstep "
            "replay --help` shows its words\n");
  const auto complaint = [](const std::vector<std::string>& words) {
    const std::string said = run_program(words).err;
    return said.substr(0, said.find(';'));
  };
  EXPECT_EQ(complaint({"replay", "x.trace", "--check", "label"}),
            "lockstep: lockstep replay: --check: `label` is none of off, labels, all");
  EXPECT_EQ(complaint({"replay", "x.trace", "--json"}),
            "lockstep: lockstep replay: --json needs a value");
  EXPECT_EQ(complaint({"replay", "x.trace", "--json", ""}),
            "lockstep: lockstep replay: --json: an empty text names no file");
  EXPECT_EQ(complaint({"compare", "sessions", "--policies", "lru", "--evidence", "x"}),
            "lockstep: --evidence: it has no effect without --cost measured:CARD\n");
  for (const std::string field : {"policy=lru", "fidelity=reference"})
    EXPECT_EQ(complaint({"compare", "sessions", "--policies", "radix", "--config", field}),
              "lockstep: policy radix: field " + field.substr(0, field.find('=')) +
                  ": it has no effect in a comparison, which checks nothing and has --policies\n");
  EXPECT_EQ(complaint({"replay", "fixtures/traces/salts_keep_prompts_apart.trace", "--check", "off",
                       "--fidelity", "reference"}),
            "lockstep: fixtures/traces/salts_keep_prompts_apart.trace: field fidelity: it has no "
            "effect with --check off, which looks into no slot\n");
  EXPECT_EQ(complaint({"explore", "--seed", "x"}),
            "lockstep: lockstep explore: --seed: `x` is not a whole number");
  EXPECT_EQ(complaint({"explore", "--seed", "-1"}),
            "lockstep: lockstep explore: --seed: `-1` is not a whole number");
  EXPECT_EQ(complaint({"explore", "--seed", "18446744073709551616"}),
            "lockstep: lockstep explore: --seed: `18446744073709551616` does not fit 64 bits");
  EXPECT_EQ(complaint({"explore", "--json", "-"}),
            "lockstep: lockstep explore: --json: `-` names no file, but /dev/stdout is one");
  EXPECT_EQ(complaint({"explore", "--timeout", "0ms"}),
            "lockstep: --timeout: `0ms` leaves no time for an answer\n");
  EXPECT_EQ(complaint({"explore", "--subject", "exec:"}),
            "lockstep: subject `exec:` names no command, as exec:COMMAND does\n");
  EXPECT_EQ(complaint({"explore", "--subject", "sglang-nobuffer"}),
            "lockstep: there is no policy `sglang-nobuffer` to explore, but `sglang-no-buffer` is "
            "one\n");
  EXPECT_EQ(complaint({"replay", "sglang-w1", "--subject", "oracle:raddix"}),
            "lockstep: sglang-w1: there is no subject `oracle:raddix`, but `radix` is one");
  EXPECT_EQ(complaint({"explore", "--config", "kv_token=5"}),
            "lockstep: --config: config has no field `kv_token`, but `kv_tokens` is one\n");
  EXPECT_EQ(complaint({"compare", "sessions", "--policies", "lru", "--capacity", "64GB"}),
            "lockstep: --capacity: `64GB` is not a number of bytes like 1000000 or 64GiB, nor inf, "
            "but `64GiB` is one\n");
  EXPECT_EQ(complaint({"explore", "--traces", "0"}),
            "lockstep: lockstep explore: --traces: `0` is not a positive number");
  EXPECT_EQ(complaint({"explore", "--traces", "99999999999999999999"}),
            "lockstep: lockstep explore: --traces: `99999999999999999999` does not fit 64 bits");
  EXPECT_NE(run_program({"list", "everything"}).err.find("everything"), std::string::npos);
}

TEST(BadInputOfTheProgram, malformedNumbersAreRefusedInASentence) {
  for (const std::string number : {"-1", "nan", "inf", "1e400", "", "1x"}) {
    const ProgramRun run = run_program({"check-log", "x.jsonl", "--gap", number});
    EXPECT_EQ(run.status, kExitBadInput);
    EXPECT_EQ(run.err, "lockstep: lockstep check-log: --gap: `" + number +
                           "` is not a number from 0 on; `lockstep check-log --help` shows its "
                           "words\n");
  }
  EXPECT_NE(run_program({"judge", "state_copy", "--candidate", "x.so:f", "--batch", "0"})
                .err.find("--batch: `0` is not a number from 1 on"),
            std::string::npos);
}

// `--json trace.trace` would replace the trace by the run's data.
TEST(BadInputOfTheProgram, anOutputIsNoInputAndNoOtherOutput) {
  const ScratchFolder folder;
  const std::string trace = folder.write("good.trace", kGood);
  std::filesystem::create_symlink(trace, folder.path("link.trace"));
  const std::string log =
      folder.write("log.jsonl", R"({"id": "a", "prompt": [1, 2], "output": [3], "cached": 0})"
                                "\n");
  const std::string rows = "fixtures/workloads/mooncake_conversation_1000.jsonl";
  const std::string twice = folder.path("twice");
  const std::vector<std::vector<std::string>> mistakes = {
      {"replay", trace, "--json", trace},
      {"replay", trace, "--sarif", folder.path("link.trace")},
      {"replay", trace, "--json", twice, "--html", folder.path("./twice")},
      {"check-log", log, "--log", log},
      {"check-log", log, "--trace", twice, "--json", twice},
      {"compare", rows, "--policies", "lru", "--json", rows},
  };
  for (const std::vector<std::string>& words : mistakes) {
    SCOPED_TRACE(testing::PrintToString(words));
    const ProgramRun run = run_program(words);
    EXPECT_EQ(run.status, kExitBadInput);
    EXPECT_TRUE(run.err.ends_with(": is read here, and would be overwritten\n") ||
                run.err.ends_with(": two options write this file\n"))
        << run.err;
  }
  EXPECT_EQ(read_text(trace), kGood);
  EXPECT_EQ(folder.entries(), (std::vector<std::string>{"good.trace", "link.trace", "log.jsonl"}));
  EXPECT_EQ(run_program({"replay", trace, "--json", "/dev/null", "--html", "/dev/null"}).status,
            kExitPass);
}

// A name of a file can hold what a terminal takes for orders.
TEST(BadInputOfTheProgram, noEscapeSequenceReachesTheTerminal) {
  const ProgramRun run = run_program({"replay",
                                      "\x1B]0;title\x07\xC2\x9B"
                                      "2J.trace"});
  EXPECT_EQ(run.status, kExitBadInput);
  EXPECT_TRUE(run.err.starts_with("lockstep: \\x1b]0;title\\x07\\xc2\\x9b2J.trace: ")) << run.err;
}

/// The exit status of a shell's command line in which $0 is the program; what it says on standard
/// error goes into the file.
int shell(const std::string& line, const std::string& errors) {
  const std::string command = "cd '" LOCKSTEP_SOURCE_DIR "' && exec 2>'" + errors +
                              "' && timeout 60 sh -c '" + line + "' '" + LOCKSTEP_PROGRAM + "'";
  const int status = std::system(command.c_str());  // NOLINT(cert-env33-c)
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// A full disk must not look like success to a reader of the output.
TEST(BadInputOfTheProgram, outputThatCannotBeWrittenIsAnEnvironmentError) {
  const ScratchFolder folder;
  const std::string errors = folder.path("errors");
  for (const char* const words : {"list policies", "--help", "list defects"}) {
    const std::string program = std::string("\"$0\" ") + words;
    EXPECT_EQ(shell(program + " >/dev/full", errors), kExitEnvironment) << words;
    EXPECT_EQ(read_text(errors),
              "lockstep: the output cannot be written: No space left on device\n");
    EXPECT_EQ(shell(program + " >&-", errors), kExitEnvironment) << words;
    EXPECT_EQ(read_text(errors), "lockstep: the output cannot be written: Bad file descriptor\n");
    EXPECT_EQ(shell(program + " 2>&- >/dev/full", errors), kExitEnvironment) << words;
  }
}

// A pipe among the files must not make anybody wait for who writes into it.
TEST(BadInputOfTheProgram, pipesAreRefusedAndNotWaitedFor) {
  const ScratchFolder folder;
  const std::string errors = folder.path("errors");
  const auto expect_refused_pipe = [&](const std::string& line) {
    EXPECT_EQ(shell(line, errors), kExitBadInput) << line;
    EXPECT_NE(read_text(errors).find(": is a pipe or a device; save"), std::string::npos)
        << read_text(errors);
  };
  expect_refused_pipe("echo check | \"$0\" replay /dev/stdin");
  expect_refused_pipe(
      "cat fixtures/workloads/qwen_bailian_small.jsonl | \"$0\" check-log /dev/stdin");
  const std::string found = folder.path("found"), fixtures = folder.path("fixtures");
  // A search only names it.
  EXPECT_EQ(shell("mkdir " + found + "; mkfifo " + found +
                      "/x.trace; \"$0\" explore --traces 1 --quiet --out " + found,
                  errors),
            kExitPass);
  expect_refused_pipe("mkdir -p " + fixtures + "/traces; mkfifo " + fixtures +
                      "/traces/x.trace; \"$0\" report --fixtures " + fixtures + " --out " +
                      folder.path("out"));
}

TEST(BadInputOfTheProgram, aTraceOfTooManyStatementsIsRefused) {
  if (testing_support::kSanitized) GTEST_SKIP() << "two million statements take minutes";
  const ScratchFolder folder;
  const std::string file = folder.write("long.trace", repeated("check\n", (1 << 21) + 1));
  const ProgramRun run = run_program({"replay", file});
  EXPECT_EQ(run.status, kExitBadInput);
  EXPECT_TRUE(run.err.starts_with("lockstep: " + file + ":2097153: a trace has at most 2097152 "))
      << run.err;
  EXPECT_LT(run.peak_kib, 1'200'000);
}

// The input was good: it is the machine that lacks something.
TEST(BadInputOfTheProgram, aFileThatCannotBeWrittenIsAnEnvironmentError) {
  const ScratchFolder folder;
  const std::string good = folder.write("good.trace", kGood);
  for (const char* const option : {"--json", "--timeline", "--decisions"}) {
    const std::string target = folder.path("missing/run.json");
    const ProgramRun run = run_program({"replay", good, option, target});
    EXPECT_EQ(run.status, kExitEnvironment);
    EXPECT_EQ(run.err, "lockstep: " + target + ": cannot be written: No such file or directory\n");
  }
  EXPECT_EQ(folder.entries(), std::vector<std::string>{"good.trace"});
}

// A server that takes seconds to start plays all files of one call.
TEST(Program, startsAChildOnceWhereItCanBeGreetedAgain) {
  const ScratchFolder folder;
  const std::string trace =
      "config policy=radix\nadmit id=r tokens=a5\nextend id=r n=5\nfinish id=r\n";
  const std::string first = folder.write("first.trace", trace);
  const std::string second = folder.write("second.trace", trace);
  const ProgramRun run = run_program({"replay", first, second, "--subject", "radix", "--subject",
                                      "exec:echo >>" + folder.path("starts") +
                                          "; exec python3 " LOCKSTEP_SOURCE_DIR
                                          "/fixtures/subjects/minimal_cache.py"});
  EXPECT_EQ(run.status, kExitPass) << run.out << run.err;
  EXPECT_EQ(read_text(folder.path("starts")), "\n");
}

// `--json /dev/stdout` stands after what was printed, and replaces nothing.
TEST(Program, writesIntoItsOwnOutput) {
  const ScratchFolder folder;
  const std::string good = folder.write("good.trace", kGood);
  const std::string printed = run_program({"replay", good}).out;
  const ProgramRun run = run_program({"replay", good, "--json", "/dev/stdout"});
  EXPECT_EQ(run.status, kExitPass) << run.err;
  const std::size_t begin = run.out.find("{\n");
  ASSERT_NE(begin, std::string::npos) << run.out;
  const std::size_t end = run.out.rfind("}\n") + 2;
  EXPECT_EQ(Json::parse(run.out.substr(begin, end - begin))["verdict"], "pass");
  EXPECT_EQ(run.out.substr(0, begin) + run.out.substr(end), printed);
}

// --- What a run prints and writes ----------------------------------------------------------------

TEST(Program, listsNamesFirstOnEachLine) {
  const auto first_words = [](const char* what) {
    std::vector<std::string> words;
    const ProgramRun run = run_program({"list", what});
    EXPECT_EQ(run.status, kExitPass);
    EXPECT_EQ(run.err, "");
    for (const std::string& line : lines_of(run.out))
      words.push_back(line.substr(0, line.find(' ')));
    EXPECT_EQ(std::ranges::count(words, ""), 0) << run.out;
    return words;
  };
  const auto has = [](const std::vector<std::string>& words, const char* name) {
    return std::ranges::count(words, name) == 1;
  };
  EXPECT_TRUE(has(first_words("policies"), "sglang-no-buffer"));
  EXPECT_FALSE(has(first_words("policies"), "oracle:radix"));
  EXPECT_TRUE(has(first_words("subjects"), "oracle:radix"));
  EXPECT_TRUE(has(first_words("defects"), "sglang-no-buffer:frees-donated-slot"));
  EXPECT_TRUE(has(first_words("layers"), "label"));
  EXPECT_TRUE(has(first_words("marks"), "checkpoint.exists"));
  for (const char* const workload : {"sglang-w1", "sessions", "mooncake", "weka-agentic"})
    EXPECT_TRUE(has(first_words("workloads"), workload)) << workload;
  EXPECT_TRUE(has(first_words("policies"), "belady"));
  std::map<std::string, Json> needs;
  for (const Json& field : Json::parse(run_program({"list", "config", "--json"}).out))
    needs[field["name"]] = field.value("needs", Json::array());
  EXPECT_EQ(needs["host_window_kv"], Json::array({"host_kv", "window"}));
  EXPECT_EQ(needs["page"], Json::array());
}

const std::string kFinish = "fixtures/traces/finish_keeps_its_state.trace";
const std::string kChunks = "fixtures/traces/chunk_ends_are_reused.trace";

// Several files are one verdict: that of the first one that finds something.
TEST(Program, replaysSeveralFilesInTheirOrder) {
  const ProgramRun good = run_program({"replay", kFinish, kChunks});
  EXPECT_EQ(good.status, kExitPass) << good.out;
  std::vector<std::string> digests;
  for (const std::string& line : lines_of(good.out))
    if (line.rfind("digest=", 0) == 0) digests.push_back(line);
  ASSERT_EQ(digests.size(), 2u);
  EXPECT_NE(digests[0], digests[1]);
  EXPECT_LT(good.out.find(kFinish), good.out.find(kChunks));

  const ProgramRun bad =
      run_program({"replay", kChunks, kFinish, "--defect", "sglang-no-buffer:shares-live-slot"});
  EXPECT_EQ(bad.status, kExitInvariant);
}

TEST(Program, comparesTheSubjectsThatWereNamed) {
  const ProgramRun run = run_program({"replay", kFinish, "--subject", "sglang-no-buffer",
                                      "--subject", "oracle", "--subject", "oracle:radix"});
  // radix has no states, so it caches more: that is what a comparison is for.
  EXPECT_EQ(run.status, kExitDiffers) << run.out;
  const ProgramRun same =
      run_program({"replay", kFinish, "--subject", "oracle", "--subject", "sglang-no-buffer"});
  EXPECT_EQ(same.status, kExitPass) << same.out;
  EXPECT_NE(same.out.find("oracle:sglang-no-buffer beside sglang-no-buffer"), std::string::npos)
      << same.out;
  EXPECT_NE(same.out.find("digest="), std::string::npos);
}

// Names and kinds of the JSON (cache_sim/replay/json.md), which other programs read.
TEST(Program, jsonHasItsFieldsAndIsTheSameBytesEachTime) {
  const ScratchFolder folder;
  std::vector<std::string> texts;
  for (const char* const name : {"one.json", "two.json"}) {
    const ProgramRun run =
        run_program({"replay", kFinish, "--defect", "sglang-no-buffer:frees-donated-slot", "--json",
                     folder.path(name)});
    EXPECT_EQ(run.status, kExitInvariant) << run.out << run.err;
    Json json = Json::parse(read_text(folder.path(name)));
    for (const char* const field : {"wall_s", "load_s"})
      EXPECT_TRUE(json["timing"][field].is_number()) << field;
    EXPECT_TRUE(json["timing"]["date"].is_string());
    json.erase("timing");
    texts.push_back(json.dump());
  }
  EXPECT_EQ(texts[0], texts[1]);

  const Json json = Json::parse(texts[0]);
  EXPECT_EQ(json["lockstep"], 1);
  EXPECT_EQ(json["command"], "replay");
  EXPECT_EQ(json["verdict"], "finding");
  EXPECT_EQ(json["workload"]["config"]["state_slots"], "16");
  EXPECT_TRUE(json["seed"].is_number_integer());
  EXPECT_TRUE(json["commit"].is_string());
  EXPECT_EQ(json["digest"].get<std::string>().size(), 16u);
  ASSERT_EQ(json["findings"].size(), 1u);
  const Json& finding = json["findings"][0];
  EXPECT_EQ(finding["kind"], "freed-slot-in-use");
  EXPECT_EQ(finding["file"], kFinish);
  EXPECT_EQ(finding["trace"], kFinish);
  EXPECT_GT(finding["line"].get<int>(), 0);
  EXPECT_GT(finding["event"].get<int>(), 0);
  for (const char* const field : {"request", "expected", "actual", "text", "replay"})
    EXPECT_TRUE(finding[field].is_string()) << field;
  ASSERT_GE(json["requests"].size(), 1u);
  for (const char* const field : {"prompt_tokens", "cached_tokens", "output_tokens"})
    EXPECT_TRUE(json["requests"][0][field].is_number_integer()) << field;
  EXPECT_EQ(json["requests"][0]["id"], "first");
  ASSERT_EQ(json["subjects"].size(), 2u);
  for (const Json* totals : {&json["totals"], &json["policies"][0], &json["policies"][1],
                             &json["subjects"][0]["totals"]})
    for (const char* const field : {"input_tokens", "hit_tokens", "hit_ratio"})
      EXPECT_TRUE((*totals)[field].is_number()) << field << totals->dump();
}

// The command in a finding is the way back to it.
TEST(Program, theReplayCommandOfAFindingFindsItAgain) {
  const ScratchFolder folder;
  run_program({"replay", kFinish, "--defect", "sglang-no-buffer:frees-donated-slot", "--config",
               "kv_tokens=4096", "--json", folder.path("run.json")});
  const Json json = Json::parse(read_text(folder.path("run.json")));
  const std::string command = json["findings"][0]["replay"];
  std::vector<std::string> words;
  std::istringstream stream(command);
  for (std::string word; stream >> word;) words.push_back(word);
  ASSERT_EQ(words.front(), "./lockstep");
  words.erase(words.begin());
  words.insert(words.end(), {"--json", folder.path("again.json")});
  EXPECT_EQ(run_program(words).status, kExitInvariant);
  Json again = Json::parse(read_text(folder.path("again.json")));
  EXPECT_EQ(again["findings"].dump(), json["findings"].dump());
}

TEST(Program, timesInTheJsonAreThoseOfTheVirtualClock) {
  const ScratchFolder folder;
  const std::string file = folder.write("clock.trace",
                                        "config chunked_prefill=4 step_time=7us\n"
                                        "request id=r tokens=a10 output=3 at=3us\nrun\n");
  run_program({"replay", file, "--json", folder.path("run.json")});
  const Json request = Json::parse(read_text(folder.path("run.json")))["requests"][0];
  EXPECT_EQ(request["ttft_ns"], 3 * 7000) << "three chunks: 4 + 4 + 2 tokens";
  EXPECT_EQ(request["e2e_ns"], 5 * 7000) << "and two more tokens";
  EXPECT_EQ(request["output_tokens"], 3);
  EXPECT_EQ(request["finish"], "length");
}

// The oracle of radix stores a prompt at the end of each chunk: the pieces share their tokens.
TEST(Program, replaysAPromptOfAMillionTokensBesideItsOracle) {
  const ScratchFolder folder;
  const std::string file = folder.write("long.trace",
                                        "config policy=radix kv_tokens=2000000\n"
                                        "request id=r tokens=a1000000 output=2\nrun\n"
                                        "request id=s tokens=a500000+b500000 output=2\nrun\n");
  const ProgramRun run = run_program({"replay", file});
  EXPECT_EQ(run.status, kExitPass) << run.out << run.err;
  EXPECT_LT(run.cpu_s, 5.0);
  if (!testing_support::kSanitized) {
    EXPECT_LT(run.peak_kib, 200 * 1024);
  }
}

// Checking is looking: it changes no decision.
TEST(Program, checkLevelsDecideTheSame) {
  std::vector<std::string> digests;
  for (const char* const level : {"off", "labels", "all"}) {
    const ProgramRun run = run_program(
        {"replay", "sglang-w1:requests=300", "--subject", "sglang-no-buffer", "--check", level});
    EXPECT_EQ(run.status, kExitPass) << run.err;
    digests.push_back(run.out.substr(run.out.find("digest=")));
    EXPECT_NE(digests.back().find("decision_digest="), std::string::npos) << run.out;
  }
  EXPECT_EQ(digests[0], digests[1]);
  EXPECT_EQ(digests[0], digests[2]);
}

TEST(Program, timelineIsAChromeTrace) {
  const ScratchFolder folder;
  const std::string tree = folder.write("tree.trace", "alloc as=s\nadvance slot=s tokens=a3\n");
  const ProgramRun run =
      run_program({"replay", kChunks, tree, "--timeline", folder.path("timeline.json")});
  EXPECT_EQ(run.status, kExitPass) << run.err;
  const Json timeline = Json::parse(read_text(folder.path("timeline.json")));
  std::vector<std::string> bars[2];
  std::map<std::string, std::int64_t> most;  // of what each counter says
  std::int64_t operations = 0;
  for (const Json& event : timeline["traceEvents"]) {
    ASSERT_TRUE(event["ph"].is_string() && event["name"].is_string()) << event.dump();
    if (event["ph"] == "C")
      most[event["name"]] =
          std::max(most[event["name"]], event["args"]["in use"].get<std::int64_t>());
    operations += event["ph"] == "i" && event["args"].contains("reply") ? 1 : 0;
    if (event["ph"] != "X") continue;
    EXPECT_GE(event["ts"].get<double>(), 0);
    EXPECT_GT(event["dur"].get<double>(), 0);
    bars[event["pid"].get<std::size_t>() - 1].push_back(event["name"]);
  }
  EXPECT_GT(std::ranges::count(bars[0], "prefill"), 5);
  EXPECT_GT(std::ranges::count(bars[0], "decode"), 5);
  EXPECT_GT(operations, 20);
  EXPECT_GT(most["KV tokens"], 100);
  EXPECT_GT(most["state slots"], 0);
  EXPECT_EQ(bars[1], (std::vector<std::string>{"alloc as=s", "advance slot=s tokens=a3"}));
}

// A copy begins where it is queued and ends where it has landed; the last one never does.
TEST(Program, timelineHasTheCopiesInFlight) {
  const ScratchFolder folder;
  const ProgramRun run =
      run_program({"replay",
                   std::string(LOCKSTEP_SOURCE_DIR) +
                       "/fixtures/traces/a_demoted_state_stays_on_the_host.trace",
                   "--timeline", folder.path("timeline.json")});
  EXPECT_EQ(run.status, kExitPass) << run.err;
  const Json timeline = Json::parse(read_text(folder.path("timeline.json")));
  std::vector<std::string> copies;
  for (const Json& event : timeline["traceEvents"])
    if (event.value("cat", "") == "copy")
      copies.push_back(fmt::format("{} {} {}", event["ph"].get<std::string>(),
                                   event["name"].get<std::string>(), event["ts"].get<double>()));
  EXPECT_EQ(copies,
            (std::vector<std::string>{"b to the host 2", "e to the host 3", "b to the device 6"}));
}

// The report of a search that was killed names the trace under way, which the seed gives again.
TEST(Program, aSearchThatIsKilledSaysAtWhichTrace) {
  const ScratchFolder folder;
  const std::string command = std::string("timeout --preserve-status -s ABRT 0.3 ") +
                              LOCKSTEP_PROGRAM + " explore --seed 9 --time 60s --out " +
                              folder.path("findings") + " 2> " + folder.path("err") + " > " +
                              folder.path("out");
  const int status = std::system(command.c_str());
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), kExitDiffers);
  const std::string err = read_text(folder.path("err"));
  EXPECT_EQ(err.find("lockstep: trace "), 0u) << err;
  EXPECT_NE(err.find(" of seed 9 kills the program while it is played\n"), std::string::npos)
      << err;
}

TEST(Program, decisionsAreALinePerRequest) {
  const ScratchFolder folder;
  run_program({"replay", kFinish, "--decisions", folder.path("decisions")});
  EXPECT_EQ(read_text(folder.path("decisions")),
            "[\"first\", 1000, 0]\n[\"again\", 1000, 0]\n[\"continued\", 1058, 1007]\n");
}

}  // namespace
}  // namespace lockstep
