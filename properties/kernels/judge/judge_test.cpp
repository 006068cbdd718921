// `lockstep judge` as its user runs it: right candidates pass, broken ones are caught and named.
#include <gmock/gmock.h>
#include <poll.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "kernels/judge/report.hpp"
#include "properties/support/candidates.hpp"
#include "properties/support/program.hpp"
#include "properties/support/sanitized.hpp"

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using namespace testing_support;

constexpr const char* kDelta = "gated_delta_rule_update";

/// A candidate of fixtures/candidates/ on the host, without its time.
ProgramRun judged(const std::string& operation, const std::string& symbol,
                  std::vector<std::string> more = {}) {
  std::vector<std::string> words{"judge",         operation,  "--candidate",
                                 library(symbol), "--device", "cpu",
                                 "--no-time",     "--batch",  "1"};
  words.insert(words.end(), more.begin(), more.end());
  return run_program(words);
}

// A candidate that follows the definition passes in every case and every type.
TEST(Judge, aRightCandidatePasses) {
  const ProgramRun run = judged(kDelta, "gdn_right", {"--types", "bfloat16/float32"});
  EXPECT_EQ(run.status, 0) << run.out << run.err;
  EXPECT_THAT(run.out, HasSubstr("34 cases: nothing found"));
  for (const std::string types : {"float32/float32", "bfloat16/bfloat16", "float16/float16"}) {
    const ProgramRun rounded =
        judged(kDelta, "gdn_right", {"--types", types, "--case", "verify-table"});
    EXPECT_EQ(rounded.status, 0) << rounded.out << rounded.err;
  }
  const ProgramRun by_tokens = judged("ssd_prefill", "ssd_right", {"--types", "float32/float32"});
  EXPECT_EQ(by_tokens.status, 0) << by_tokens.out << by_tokens.err;
}

// The other operations have definitions and cases of their own.
TEST(Judge, everyOperationHasARightCandidate) {
  const std::vector<std::pair<std::string, std::string>> all{
      {"selective_state_update", "ssu_right"},
      {"mamba1_decode", "mamba1_right"},
      {"mamba1_prefill", "mamba1_prefill_right"},
      {"mamba2_mixer_decode", "mixer_right"},
      {"gated_delta_net_decode", "net_right"},
      {"causal_conv1d_update", "conv_right"},
      {"causal_conv1d", "prompt_conv_right"},
      {"gated_delta_rule_prefill", "prefill_right"},
      {"ssd_prefill", "ssd_right"},
      {"mla_decode", "mla_right"},
      {"mla_decode_e4m3", "mla_right"},
      {"mla_prefill", "mla_prefill_right"},
      {"merge_attention", "merge_right"},
      {"batched_product", "product_right"},
      {"selective_state_ring_update", "ssu_ring_right"},
      {"gated_delta_rule_ring_update", "gdn_ring_right"},
      {"state_copy", "copy_right"},
      {"state_scatter_accepted", "scatter_right"}};
  for (const auto& [operation, symbol] : all) {
    // The serving shape takes seconds here, and minutes with a sanitizer.
    const std::string small = testing_support::kSanitized ? "decode-bare" : "decode";
    const ProgramRun run =
        judged(operation, symbol, {"--case", symbol == "ssu_right" ? small : ""});
    EXPECT_EQ(run.status, 0) << run.out << run.err;
    EXPECT_THAT(run.out, HasSubstr(": nothing found"));
    EXPECT_THAT(run_program({"list", "operations"}).out, HasSubstr(operation + " "));
  }
}

struct Broken {
  std::string operation;
  std::string symbol;
  std::string only;  ///< cases
  int status;
  std::vector<std::string> said;
};

void expect_caught(const std::vector<Broken>& all) {
  for (const Broken& broken : all) {
    const ProgramRun run = judged(broken.operation, broken.symbol,
                                  {"--types", "float32/float32", "--case", broken.only});
    EXPECT_EQ(run.status, broken.status) << broken.symbol << '\n' << run.out << run.err;
    for (const std::string& said : broken.said)
      EXPECT_THAT(run.out, HasSubstr(said)) << broken.symbol;
  }
}

// Wrong numbers are traced to the mistake behind them, or to the stage.
TEST(Judge, aMistakeIsNamed) {
  expect_caught({
      {kDelta,
       "gdn_no_l2norm",
       "decode-odd",
       11,
       {"agrees with the definition without the L2 norm of q and k"}},
      {kDelta,
       "gdn_no_scale",
       "decode-odd",
       11,
       {"without the scale of q", "the state is right; first wrong stage: the read-out S q"}},
      {kDelta,
       "gdn_group_modulo",
       "ready-gates",
       11,
       {"on key head h % H", "only heads whose group"}},
      {kDelta,
       "gdn_first_column",
       "verify-table",
       10,
       {"first column of the table read", "only rows that had accepted more than one token"}},
      {kDelta, "gdn_decay_after", "decode-odd", 11, {"with the decay applied after the update"}},
      {kDelta,
       "gdn_half_beta",
       "decode-odd",
       11,
       {"no known mistake explains 1 wrong case",
        "v - S k are right; first wrong stage: beta times it"}},
      {kDelta,
       "gdn_late_state",
       "decode-odd",
       11,
       {"the state after it is the decayed one: the token's own update is missing"}},
      {kDelta, "gdn_coarse_state", "decode-odd", 11, {"no known mistake explains 1 wrong case"}},
      {kDelta, "gdn_short_columns", "decode-odd", 11, {"only value columns 32 and beyond"}},
  });
}

TEST(Judge, aMistakeOfAnotherOperationIsNamed) {
  constexpr const char *kMamba = "selective_state_update", *kConv = "causal_conv1d_update";
  expect_caught({
      {kMamba, "ssu_no_softplus", "decode-limits", 11, {"without the softplus of dt"}},
      {kMamba, "ssu_no_dt_bias", "decode-ones", 11, {"without dt_bias"}},
      {kMamba, "ssu_no_skip", "decode-limits", 11, {"definition without D x"}},
      {kMamba, "ssu_no_z", "decode-limits", 11, {"without the gate z"}},
      {kMamba, "ssu_output_before", "decode-mamba1", 11, {"output read before the state's update"}},
      {kMamba, "ssu_row_slots", "decode-limits", 10, {"row i on slot i, without state_indices"}},
      {"mamba1_decode", "mamba1_no_norms", "weighted", 11, {"without the norms of dt, B and C"}},
      {"mamba1_decode", "mamba1_swapped_weights", "weighted", 11, {"norms swapped"}},
      {"mamba1_decode", "mamba1_no_gate", "in-order", 11, {"without the gate z"}},
      {"mamba1_prefill", "mamba1_prefill_no_carry", "one-row", 11, {"row's initial state"}},
      {"mamba1_prefill", "mamba1_prefill_no_bias", "one-token", 11, {"without dt_bias"}},
      {"mamba1_prefill", "mamba1_prefill_all_resume", "fresh-rows", 10, {"has_initial_state left"}},
      {"mamba2_mixer_decode", "mixer_no_bias", "parts", 11, {"without the convolution's bias"}},
      {"mamba2_mixer_decode", "mixer_late_gate", "in-order", 11, {"the gate z behind the norm"}},
      {"mamba2_mixer_decode", "mixer_one_norm", "pad-slot", 11, {"one norm over the channels"}},
      {"mamba2_mixer_decode", "mixer_first_column", "verify-eight", 10, {"one accepted token"}},
      {"gated_delta_net_decode", "net_keys_stay", "in-order", 11, {"windows of q and k left as"}},
      {"gated_delta_net_decode", "net_last_state", "verify-bias", 11, {"state after a row's last"}},
      {"gated_delta_net_decode", "net_first_column", "verify-eight", 10, {"one accepted token"}},
      {kConv, "conv_no_bias", "width", 11, {"definition without the bias"}},
      {kConv, "conv_no_silu", "width", 11, {"without the activation"}},
      {kConv, "conv_reversed", "decode-bare", 11, {"taps of the weight reversed"}},
      {kConv, "conv_state_stays", "decode-bare", 11, {"with the state left as it was"}},
      {kConv, "conv_writes_holes", "strided", 10, {"conv_state: memory between its elements"}},
      {"causal_conv1d",
       "prompt_conv_rows_touch",
       "width-3",
       11,
       {"a row's first tokens seeing the end of the row before it"}},
      {"causal_conv1d",
       "prompt_conv_all_resume",
       "fresh-rows",
       10,
       {"has_initial_state left out: fresh rows resume what lies there"}},
      {"causal_conv1d", "prompt_conv_state_stays", "bare", 11, {"with the state left as it was"}},
      {"gated_delta_rule_prefill",
       "prefill_no_carry",
       "one-row",
       11,
       {"every chunk of 64 tokens started from the row's initial state"}},
      {"ssd_prefill",
       "ssd_no_carry",
       "one-row",
       11,
       {"every chunk of 64 tokens started from the row's initial state"}},
      {"ssd_prefill",
       "ssd_all_resume",
       "fresh-rows",
       10,
       {"has_initial_state left out: fresh rows resume what lies there"}},
      {"ssd_prefill", "ssd_no_limits", "limits", 11, {"without dt_min and dt_max"}},
      {"ssd_prefill", "ssd_no_dt_max", "limits", 11, {"definition without dt_max"}},
      {"mla_decode", "mla_scale_of_width", "one-request", 11, {"with the scale 576^-0.5"}},
      {"mla_decode", "mla_no_k_pe", "one-request", 11, {"without k_pe, the last 64 columns"}},
      {"mla_decode", "mla_mean_of_pieces", "one-head", 11, {"merged without their lse"}},
      {"mla_decode", "mla_piece_too_many", "one-head", 11, {"an empty piece merged"}},
      {"mla_decode", "mla_top_left", "around", 11, {"a causal border from the top left"}},
      {"mla_decode", "mla_empty_minus", "no-keys", 11, {"with an lse of -inf", "lse: "}},
      {"mla_decode", "mla_no_kv_scale", "e4m3", 11, {"without kv_scale"}},
      {"mla_decode", "mla_first_scale", "tokens", 11, {"with the first scale of each token"}},
      {"mla_decode_e4m3", "mla_queries_in_e4m3", "large", 11, {"without a scale of their row"}},
      {"mla_decode_e4m3", "mla_p_in_e4m3", "in-e4m3", 11, {"rounded to e4m3 once"}},
      {"mla_prefill", "mla_prefill_scale_of_nope", "one-row", 11, {"with the scale 128^-0.5"}},
      {"mla_prefill", "mla_prefill_no_k_pe", "one-row", 11, {"without k_pe, the last 64 columns"}},
      {"mla_prefill", "mla_prefill_top_left", "prefix", 11, {"a causal border from the top left"}},
      {"mla_prefill", "mla_prefill_empty_plus", "empty", 11, {"with an lse of +inf", "lse: "}},
      {"mla_prefill", "mla_prefill_piece_too_many", "one-block", 11, {"an empty piece merged"}},
      {"batched_product", "product_no_x_scale", "blocks", 11, {"without x_scale"}},
      {"batched_product", "product_no_tail", "around", 11, {"after the last multiple of 128"}},
      {"merge_attention", "merge_mean", "odd-sizes", 11, {"the mean of both sides"}},
      {"merge_attention", "merge_plus_is_a_weight", "empty", 11, {"+inf taken for a weight"}},
      {"merge_attention", "merge_turned_lse", "some-tokens", 11, {"lse taken for [T, heads]"}},
      {"merge_attention", "merge_ignores_strides", "lse-by", 11, {"no known mistake explains"}},
      {"merge_attention", "merge_ignores_strides", "wide-rows", 10, {"padding-leak: out:"}},
      {"merge_attention", "merge_no_largest", "large-lse", 11, {"NaN or infinite"}},
      {"merge_attention", "merge_nan_of_empty", "empty-sides", 10, {"padding-leak: out:"}},
      {"state_copy", "copy_in_order", "c", 11, {"sources were overwritten"}},
      {"state_scatter_accepted", "scatter_by_index", "every", 11, {"index instead of the count"}},
  });
}

// A state that is written once in L tokens: by each row's own window, with the live entries alone.
TEST(Judge, aMistakeOfARingIsNamed) {
  constexpr const char *kMamba = "selective_state_ring_update",
                       *kRing = "gated_delta_rule_ring_update";
  expect_caught({
      {kMamba, "ssu_ring_reads_one_more", "ring-of-5", 10, {"one entry behind the cursor counted"}},
      {kMamba, "ssu_ring_reads_one_less", "ring-of-5", 11, {"the newest entry of the ring left"}},
      {kMamba, "ssu_ring_by_position", "ring-of-5", 10, {"with position % L entries read"}},
      {kMamba, "ssu_ring_flush_when_full", "ring-of-5", 11, {"written when the ring is full"}},
      {kMamba, "ssu_ring_flush_together", "ring-of-5", 11, {"when one row's window ends"}},
      {kMamba, "ssu_ring_never_flushed", "ring-of-5", 11, {"with no state written"}},
      {kMamba, "ssu_ring_own_decay", "ring-of-5", 11, {"decayed by its own step too"}},
      {kMamba, "ssu_ring_raw_dt", "ring-of-5", 11, {"with dt in the ring as it came"}},
      {kRing, "gdn_ring_reads_one_more", "ring-of-5", 10, {"one entry behind the cursor counted"}},
      {kRing, "gdn_ring_entry_late", "ring-of-5", 11, {"one place behind the cursor"}},
      {kRing, "gdn_ring_flush_together", "ring-of-5", 11, {"when one row's window ends"}},
      {kRing, "gdn_ring_flush_without_token", "ring-of-5", 11, {"without the newest token"}},
      {kRing, "gdn_ring_delta_of_state", "ring-of-5", 11, {"S k of the state alone"}},
      {kRing, "gdn_ring_scaled_k", "ring-of-5", 11, {"the scaled key in ring_k"}},
  });
  const ProgramRun narrow = judged(kRing, "gdn_ring_narrow_state", {"--case", "ring-of-5"});
  EXPECT_EQ(narrow.status, 11) << narrow.out;
  EXPECT_THAT(narrow.out, HasSubstr("ring-of-5: output-differs: state:"));
}

// Memory that a candidate writes or reads and should not.
TEST(Judge, memoryOutsideTheOperationIsGuarded) {
  expect_caught({
      {kDelta,
       "gdn_out_of_bounds",
       "decode-ones",
       10,
       {"out-of-range: out: 4 bytes after the tensor"}},
      {kDelta,
       "gdn_padding_is_slot_0",
       "ready-gates",
       10,
       {"state: slot 0 was written (no row names it): padding entries seem to be taken for slot "
        "0"}},
      {kDelta,
       "gdn_nan_leak",
       "ready-gates",
       10,
       {"padding-leak: out:", "only rows whose slot is padding"}},
      {"mla_decode", "mla_reads_tail", "pages-of-128", 10, {"padding-leak: out:"}},
      {"mla_prefill", "mla_prefill_whole_tiles", "around", 10, {"padding-leak: out:"}},
      {kDelta, "gdn_ignores_strides", "strided", 10, {"decode-strided: padding-leak: out:"}},
      {kDelta,
       "gdn_writes_input",
       "decode-odd",
       10,
       {"k: an input was written (1 element, first [0, 0, 0])"}},
  });
}

TEST(Judge, twoRunsHaveTheSameBits) {
  const ProgramRun run = judged(kDelta, "gdn_unstable", {"--case", "odd", "--types", "float32"});
  EXPECT_EQ(run.status, 13) << run.out;
  EXPECT_THAT(run.out, HasSubstr("two runs on the same bytes differ in 1 element"));
}

// The judge survives anything that a candidate does, and reports it.
TEST(Judge, aCandidateMayDieOrFallSilent) {
  const ProgramRun died = judged(kDelta, "gdn_dies", {"--case", "packed-rows"});
  EXPECT_EQ(died.status, 11);
  EXPECT_THAT(died.out, HasSubstr("packed-rows: subject-died: it ended: signal 6"));
  EXPECT_THAT(died.out, HasSubstr("\n3 cases: 1 finding\n")) << "the others have a new process";
  const ProgramRun silent =
      judged(kDelta, "gdn_hangs", {"--timeout", "1", "--case", "decode-ones"});
  EXPECT_EQ(silent.status, 11);
  EXPECT_THAT(silent.out, HasSubstr("subject-silent: no answer within 1 s"));
  const ProgramRun failed = judged(kDelta, "gdn_fails", {"--case", "decode-ones"});
  EXPECT_EQ(failed.status, 11);
  EXPECT_THAT(failed.out, HasSubstr("it returned 2: no luck"));
}

// A candidate's daemons hold the device, and every pipe, for as long as they live.
TEST(Judge, processesOfACandidateEndWithTheJudge) {
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);  // which the daemons inherit: it ends when the last of them is gone
  const ProgramRun run = judged(kDelta, "gdn_leaves_daemons", {"--case", "decode-ones"});
  ::close(pipe[1]);
  EXPECT_EQ(run.status, 0) << run.out << run.err;
  pollfd end{pipe[0], POLLIN, 0};
  char byte = 0;
  EXPECT_TRUE(::poll(&end, 1, 5000) == 1 && ::read(pipe[0], &byte, 1) == 0) << "a daemon lives on";
  ::close(pipe[0]);
}

// A user's environment and a candidate's words may be anything; the verdict is kept.
TEST(Judge, bytesThatAreNoTextLoseNoVerdict) {
  const ScratchFolder folder;
  const std::string json = folder.path("verdict.json");
  const ProgramRun died =
      judged(kDelta, "gdn_dies_in_bytes", {"--case", "decode-ones", "--json", json});
  EXPECT_EQ(died.status, 11) << died.err;
  EXPECT_THAT(died.out, HasSubstr("exit status 9"));
  EXPECT_THAT(died.out, Not(HasSubstr("\x1b")));
  EXPECT_EQ(nlohmann::json::parse(read_text(json)).at("verdict"), "finding");
  const ProgramRun refused =
      judged(kDelta, "gdn_refuses_in_bytes", {"--case", "decode-o", "--json", json});
  EXPECT_EQ(refused.status, 0) << refused.out << refused.err;
  EXPECT_EQ(nlohmann::json::parse(read_text(json)).at("verdict"), "pass");
  const std::string elsewhere = folder.path("\xff\xfe.so");
  std::filesystem::copy_file(LOCKSTEP_CANDIDATES, elsewhere);
  const ProgramRun run = run_program({"judge", kDelta, "--candidate", elsewhere + ":gdn_right",
                                      "--device", "cpu", "--case", "decode-ones", "--json", json});
  EXPECT_EQ(run.status, 0) << run.err;
  EXPECT_EQ(nlohmann::json::parse(read_text(json)).at("verdict"), "pass");
}

/// An environment variable for as long as this lives.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    if (const char* const old = std::getenv(name); old != nullptr) before_ = old;
    ::setenv(name, value.c_str(), 1);
  }
  ~Variable() {
    if (before_)
      ::setenv(name_, before_->c_str(), 1);
    else
      ::unsetenv(name_);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

// Cases and results go through memory: a full or unwritable disk is no candidate's fault.
TEST(Judge, noTemporaryFilesAreNeeded) {
  const Variable nowhere("TMPDIR", "/dev/full");
  const ProgramRun run = judged(kDelta, "gdn_right", {"--case", "decode-ones"});
  EXPECT_EQ(run.status, 0) << run.out << run.err;
}

// A candidate that cannot be run is refused before any case is built, and operations that were not
// asked for are never built.
TEST(Judge, refusesWithoutBuildingCases) {
  const ProgramRun missing = run_program(
      {"judge", kDelta, "--candidate", "missing.so:f", "--device", "cpu", "--batch", "64"});
  EXPECT_EQ(missing.status, 2);
  const ProgramRun filtered =
      run_program({"judge", kDelta, "--candidate", library("gdn_right"), "--device", "cpu",
                   "--batch", "1000000000", "--case", "decode-ones"});
  EXPECT_EQ(filtered.status, 0) << filtered.err;
  if (!testing_support::kSanitized) {
    EXPECT_LT(missing.peak_kib, 400 * 1024);
    EXPECT_LT(filtered.peak_kib, 400 * 1024);
  }
}

// Every layout meets every kind of row, so a mistake in one of the meetings is seen.
TEST(Judge, aMistakeOfOneLayoutOrKindOfRowIsSeen) {
  expect_caught({
      {kDelta, "gdn_sevens", "packed-rows", 11, {"7.000000 for"}},
      {kDelta, "gdn_sevens", "verify", 11, {"7.000000 for"}},
      {kDelta, "gdn_k_major_verification", "verify", 11, {"verify-table-k-major: output-differs"}},
      {"causal_conv1d_update",
       "conv_channels_last_verification",
       "verify",
       11,
       {"verify-accepted-channels-last: output-differs"}},
      {"causal_conv1d_update",
       "conv_reads_tails",
       "verify-accepted",
       10,
       {"verify-accepted: padding-leak: out:"}},
      {"causal_conv1d_update",
       "conv_padding_is_slot_0",
       "decode-strided",
       10,
       {"conv_state: slot 0 was written"}},
      {"ssd_prefill",
       "ssd_skips_empty_rows",
       "fresh-rows",
       11,
       {"NaN or infinite; only rows without a token"}},
      {"causal_conv1d",
       "prompt_conv_skips_empty_rows",
       "fresh-rows",
       11,
       {"NaN or infinite; only rows without a token"}},
  });
}

// A live row of one token stands in front of another row, in every kind of packed rows.
TEST(Judge, aShortRowThatSpoilsTheNextIsSeen) {
  for (const std::string only : {"packed-rows", "verify-table", "verify-snapshots"}) {
    const ProgramRun run = judged(kDelta, "gdn_one_token_spoils_next", {"--case", only});
    EXPECT_EQ(run.status, 11) << only << run.out;
    EXPECT_THAT(run.out, HasSubstr("0.250000 for")) << only;
  }
}

// Servers that promise the same answer at any load need it of every kernel: a row's bits do not
// depend on the rest of its batch.
TEST(Judge, aRowThatDependsOnItsBatchIsSeenWithTheSmallestPair) {
  const auto run = [](const std::string& operation, const std::string& symbol,
                      const std::string& only, bool asked = true) {
    std::vector<std::string> more{"--types", "float32/float32", "--case", only};
    if (asked) more.emplace_back("--batch-invariant");
    return judged(operation, symbol, more);
  };
  EXPECT_EQ(run(kDelta, "gdn_splits_by_batch", "decode", false).status, 0) << "it is right";
  const ProgramRun split = run(kDelta, "gdn_splits_by_batch", "packed-rows");
  EXPECT_EQ(split.status, 10) << split.out;
  EXPECT_THAT(split.out, HasSubstr("packed-rows: batch-variance: out: row 0 has other bits in the "
                                   "batch of rows "));
  EXPECT_THAT(split.out, HasSubstr("than in the batch of rows 0\n"));
  const ProgramRun place = run(kDelta, "gdn_depends_on_place", "decode-odd");
  EXPECT_EQ(place.status, 10) << place.out;
  EXPECT_THAT(place.out, HasSubstr("(as number 1)"));
  const ProgramRun tiles = run("ssd_prefill", "ssd_tiles_over_rows", "short-rows");
  EXPECT_EQ(tiles.status, 10) << tiles.out;
  const ProgramRun longest = run("mla_prefill", "mla_prefill_splits_by_longest", "many-heads");
  EXPECT_EQ(longest.status, 10) << longest.out;
  const auto rows = judged("batched_product", "product_splits_by_rows",
                           {"--types", "float32/float32", "--case", "many", "--batch-invariant"});
  EXPECT_EQ(rows.status, 10) << rows.out;
  EXPECT_THAT(rows.out, HasSubstr("… (16 rows)")) << "the smallest batch that is split";
  EXPECT_THAT(longest.out, HasSubstr("row 1 has other bits in the batch of rows 0, 1 (as number 1) "
                                     "than in the batch of rows 1\n"));
}

TEST(Judge, aRightCandidatesRowsAreTheSameInEveryBatch) {
  const std::vector<std::vector<std::string>> all{
      {kDelta, "gdn_right", "packed-rows"},
      {"selective_state_update", "ssu_right", "verify-table"},
      {"causal_conv1d_update", "conv_right", "verify"},
      {"causal_conv1d", "prompt_conv_right", "rows"},
      {"gated_delta_rule_prefill", "prefill_right", "ragged"},
      {"ssd_prefill", "ssd_right", "fresh-rows"},
      {"mla_decode", "mla_right", "drafts"},
      {"mla_prefill", "mla_prefill_right", "empty"},
      {"merge_attention", "merge_right", "s-"},
      {"batched_product", "product_right", "blocks"},
      {"selective_state_ring_update", "ssu_ring_right", "ring"},
      {"gated_delta_rule_ring_update", "gdn_ring_right", "ring"}};
  for (const auto& one : all) {
    const ProgramRun run = judged(one[0], one[1], {"--batch-invariant", "--case", one[2]});
    EXPECT_EQ(run.status, 0) << one[0] << run.out << run.err;
    EXPECT_THAT(run.out, HasSubstr("rows were compared in "));
  }
}

// A grid counts its second and third dimension in 16 bits; a graph is launched again when rows have
// left.
TEST(Judge, aBatchBeyondAGridAndALaunchThatIsRepeatedAreTried) {
  constexpr const char* kConv = "causal_conv1d_update";
  EXPECT_EQ(judged(kConv, "conv_right", {"--case", "rows-65537"}).status, 0);
  const ProgramRun grid = judged(kConv, "conv_grid_of_16_bits", {"--case", "rows-65537"});
  EXPECT_EQ(grid.status, 11) << grid.out;
  EXPECT_THAT(grid.out, HasSubstr("(tokens 65535 to 65536)"));
  const auto repeated = [](const std::string& symbol) {
    return run_program({"judge", kDelta, "--candidate", library(symbol), "--device", "cpu",
                        "--no-time", "--batch", "4", "--case", "serving"});
  };
  EXPECT_EQ(repeated("gdn_right").status, 0);
  const ProgramRun kept = repeated("gdn_keeps_rows_of_capture");
  EXPECT_EQ(kept.status, 11) << kept.out;
  EXPECT_THAT(kept.out, HasSubstr("2 of 2 repeated calls left other bytes"));
}

// Slots beyond 16 bits, gates beyond exp's range, more rows than a kernel counts, the sign of zero.
TEST(Judge, aMistakeOfLargeNumbersIsSeen) {
  expect_caught({
      {kDelta, "gdn_short_slots", "decode-h", 10, {"decode-high-slots: padding-leak: out:"}},
      {kDelta, "gdn_naive_softplus", "decode-s", 11, {"decode-steep-gates: output-differs: out:"}},
      {kDelta, "gdn_hundred_rows", "decode-many", 11, {"decode-many-rows: output-differs: out:"}},
      {"state_copy", "copy_adds_zero", "one", 11, {"not the copy"}},
  });
}

// Rounding to bfloat16 costs 0.2 percent: a scale that is wrong by one percent is no rounding.
TEST(Judge, aScaleWrongByOnePercentIsSeen) {
  const ProgramRun run = judged(kDelta, "gdn_one_percent", {"--case", "decode-no-padding"});
  EXPECT_EQ(run.status, 11) << run.out;
}

// --- Who cheats ----------------------------------------------------------------------------------

/// A candidate beside the clock.
ProgramRun timed(const std::string& candidate, const std::string& json) {
  return run_program({"judge", kDelta, "--candidate", candidate, "--device", "cpu", "--case",
                      "serving-in-order", "--batch", "1", "--json", json});
}

// The results of timed calls are compared, on inputs that change places in memory.
TEST(Judge, aTimedCallThatDoesNothingIsSeen) {
  const ScratchFolder folder;
  const std::string json = folder.path("verdict.json");
  for (const std::string cheat : {"gdn_counts_calls", "gdn_caches_by_address"}) {
    const ProgramRun run = timed(library(cheat), json);
    EXPECT_EQ(run.status, 11) << run.out << run.err;
    EXPECT_THAT(run.out, HasSubstr("timed calls left other bytes than an untimed one")) << cheat;
    const auto speed = nlohmann::json::parse(read_text(json)).at("timing").at("speed").at(0);
    EXPECT_GT(speed.at("calls_wrong"), 0);
    EXPECT_TRUE(speed.contains("doubt"));
  }
}

// The clock is the judge's own.
TEST(Judge, aPatchedClockChangesNothing) {
  const ScratchFolder folder;
  const std::string json = folder.path("verdict.json");
  const ProgramRun run = timed(library("gdn_patches_clock"), json);
  EXPECT_EQ(run.status, 0) << run.out << run.err;
  const auto speed = nlohmann::json::parse(read_text(json)).at("timing").at("speed").at(0);
  EXPECT_GT(speed.at("time_us"), 0.0);
  EXPECT_LT(speed.at("limit_share"), 1.1);
  EXPECT_GT(speed.at("calls_compared"), 0);
}

// Faster than memory moves, or than the judge's own clock: the time is not believed.
TEST(Judge, anImpossibleTimeIsFlagged) {
  using namespace judging;
  const JudgedKernel operation{.name = "an operation"};
  const JudgeRequest request;
  const CaseOptions options;
  const Machine machine{.device = "a GPU", .copy_gbps = 1000, .most_gbps = 1000, .on_gpu = true};
  std::vector<JudgedCase> cases(1);
  cases[0].which.name = "serving";
  cases[0].which.bytes = 1'000'000;  // a microsecond
  cases[0].runs.outcome = Outcome::done;
  std::vector<TimedCase> timed(1);
  timed[0].twin.runs.outcome = timed[0].calls.outcome = Outcome::done;
  const auto report = [&](double us) {
    timed[0].calls.us = us;
    return finished({operation, request, options, machine, cases, timed, {}, 0});
  };
  const auto text = [&](double us) { return report(us).text; };
  EXPECT_THAT(text(0.95), Not(HasSubstr("LOOK TWICE")));
  EXPECT_EQ(report(0.95).status, 0);
  EXPECT_THAT(text(0.8), HasSubstr("LOOK TWICE: faster than this device moves bytes"));
  EXPECT_THAT(text(0.8), HasSubstr("1.2 times as fast as this machine moves any"));
  EXPECT_EQ(report(0.8).status, 11);
  timed[0].calls.reported_us = 0.1;
  EXPECT_THAT(text(5), HasSubstr("LOOK TWICE: the candidate's process reports 0.10 us"));
  const auto findings = findings_of_calls(operation, cases[0].which, timed[0].calls, "timed call");
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].kind, FindingKind::answer_differs);
}

// Nothing that a candidate writes stands for a verdict, and its end is no good end.
TEST(Judge, aForgedStatusIsNoVerdict) {
  const ProgramRun run = judged(kDelta, "gdn_forges_status", {"--case", "decode-ones"});
  EXPECT_EQ(run.status, 11) << run.out << run.err;
  EXPECT_THAT(run.out, HasSubstr("decode-ones: subject-"));
}

// A candidate that refuses most cases may be right where it is defined, and has not passed the test
// of the others.
TEST(Judge, fewerThanHalfOfTheCasesAreAStatusOfTheirOwn) {
  const ScratchFolder folder;
  const std::string json = folder.path("verdict.json");
  const ProgramRun most = judged(kDelta, "gdn_refuses_most", {"--case", "decode", "--json", json});
  EXPECT_EQ(most.status, 4) << most.out;
  EXPECT_THAT(most.out, HasSubstr("left out: nothing found where it is defined, which is fewer"));
  EXPECT_EQ(nlohmann::json::parse(read_text(json)).at("verdict"), "partial");
  const ProgramRun all = judged(kDelta, "gdn_knows_nothing", {"--case", "decode-odd"});
  EXPECT_EQ(all.status, 2) << all.out;
  EXPECT_THAT(all.out, HasSubstr("1 left out: no verdict, because it takes no case"));
  const ProgramRun half = judged(kDelta, "gdn_refuses_most", {"--case", "decode-ones"});
  EXPECT_EQ(half.status, 0) << half.out;
}

constexpr const char* kTorchCandidate = "fixtures/candidates/torch_delta_rule.py:";

/// The judge with another Python.
ProgramRun judged_by(const std::string& python, const std::string& candidate,
                     const std::string& only) {
  std::optional<Variable> named;
  if (!python.empty()) named.emplace("LOCKSTEP_PYTHON", python);
  return run_program({"judge", kDelta, "--candidate", candidate, "--device", "cpu", "--no-time",
                      "--batch", "1", "--case", only});
}

// A Python function is a candidate; needs a Python with PyTorch.
TEST(JudgePython, aFunctionIsJudgedLikeALibrary) {
  std::string python;
  if (!has_pytorch(python))
    GTEST_SKIP() << python << " has no PyTorch (LOCKSTEP_PYTHON names another one)";
  const auto run = [](const std::string& function, const std::string& only) {
    return judged_by("", kTorchCandidate + function, only);
  };
  const ProgramRun right = run("right", "strided");  // every kind of row
  EXPECT_EQ(right.status, 0) << right.out << right.err;
  EXPECT_THAT(right.out, HasSubstr("8 cases: nothing found"));
  const ProgramRun wrong = run("no_delta", "decode-odd");
  EXPECT_EQ(wrong.status, 11) << wrong.out << wrong.err;
  EXPECT_THAT(wrong.out, HasSubstr("with v instead of v - S k (no delta rule)"));
  EXPECT_THAT(run("no_softplus", "decode-odd").out, HasSubstr("without the softplus in the decay"));
  const ProgramRun raised = run("raises", "decode-ones");
  EXPECT_EQ(raised.status, 11);
  EXPECT_THAT(raised.out, HasSubstr("KeyError: 'a key that is not there' (torch_delta_rule.py:"));
  EXPECT_THAT(run("wrong_shape", "decode-ones").out,
              HasSubstr("out is [1, 3, 1], and [1, 1, 3, 1] came back"));
  const ProgramRun partly = run("decode_alone", "to");
  EXPECT_EQ(partly.status, 0) << partly.out;
  EXPECT_THAT(partly.out, HasSubstr("left out  one token per row alone"));
  const ProgramRun absent = run("nobody", "decode-ones");
  EXPECT_EQ(absent.status, 2);
  EXPECT_THAT(absent.err, HasSubstr("torch_delta_rule.py has no `nobody`"));
  const ScratchFolder folder;
  const std::string broken = folder.write("broken.py", "import nothing_of_that_name\n");
  const ProgramRun unimportable = judged_by("", broken + ":f", "decode-ones");
  EXPECT_EQ(unimportable.status, 3);
  EXPECT_THAT(unimportable.err, HasSubstr("broken.py does not import: ModuleNotFoundError"));
}

// A candidate that gives back its stages learns which is the first wrong one.
TEST(JudgePython, theFirstWrongStageOfAChunkIsNamed) {
  std::string python;
  if (!has_pytorch(python))
    GTEST_SKIP() << python << " has no PyTorch (LOCKSTEP_PYTHON names another one)";
  const auto run = [](const std::string& function) {
    return run_program({"judge", "gated_delta_rule_prefill", "--candidate",
                        "fixtures/candidates/torch_delta_prefill.py:" + function, "--device", "cpu",
                        "--case", "one-row"});
  };
  EXPECT_EQ(run("right").status, 0);
  EXPECT_THAT(run("wrong_w").out, HasSubstr("tokens 0 to 63: U is right; first wrong stage: W;"));
  EXPECT_THAT(run("wrong_state").out,
              HasSubstr("tokens 0 to 63: U is right; W is right; new_values is right; first wrong "
                        "stage: chunk_states;"));
  EXPECT_THAT(run("wrong_output").out, HasSubstr("chunk_states is right; first wrong stage: O;"));
}

TEST(JudgePython, anOperationOfTwoResultsGivesBoth) {
  std::string python;
  if (!has_pytorch(python))
    GTEST_SKIP() << python << " has no PyTorch (LOCKSTEP_PYTHON names another one)";
  const auto run = [](const std::string& function, const std::string& only = "drafts") {
    return run_program({"judge", "mla_decode", "--candidate",
                        "fixtures/candidates/torch_mla.py:" + function, "--device", "cpu", "--case",
                        only});
  };
  const ProgramRun right = run("right");
  EXPECT_EQ(right.status, 0) << right.out << right.err;
  EXPECT_THAT(right.out, HasSubstr("3 cases: nothing found"));
  EXPECT_EQ(run("right", "e4m3").status, 0);
  EXPECT_EQ(run("right", "tokens").status, 0);
  EXPECT_THAT(run("lse_of_2").out, HasSubstr("with lse in powers of two"));
  EXPECT_THAT(run("without_lse").out,
              HasSubstr("lse: a tensor was to be returned, and NoneType came"));
}

// In Python a cheat is easier still: clocks are names, and a stack says who calls.
TEST(JudgePython, aCheatIsSeen) {
  std::string python;
  if (!has_pytorch(python))
    GTEST_SKIP() << python << " has no PyTorch (LOCKSTEP_PYTHON names another one)";
  const ScratchFolder folder;
  const std::string json = folder.path("verdict.json");
  const auto run = [&](const std::string& cheat) {
    return timed("fixtures/candidates/torch_cheats.py:" + cheat, json);
  };
  const auto speed = [&] {
    return nlohmann::json::parse(read_text(json)).at("timing").at("speed").at(0);
  };
  for (const std::string cheat : {"skips_when_timed", "caches_by_address"}) {
    // 10: untimed already; 13: an address came again in one of two equal calls, and not in the
    // other.
    EXPECT_THAT(run(cheat).status, testing::AnyOf(10, 11, 13)) << cheat;
    EXPECT_GT(speed().at("calls_wrong"), 0) << cheat;
  }
  for (const std::string honest : {"patches_clock", "works_when_read"}) {
    const ProgramRun in_time = run(honest);
    EXPECT_EQ(in_time.status, 0) << honest << in_time.out;
    EXPECT_LT(speed().at("limit_share"), 1.1) << honest;
  }
  EXPECT_GT(speed().at("time_us"), 0.0);
  EXPECT_EQ(run("forges_status").status, 11);
}

// Without PyTorch, or without Python, one sentence says what is missing.
TEST(JudgePython, aMissingPythonOrPyTorchIsNamed) {
  const ScratchFolder folder;
  const ProgramRun none = judged_by(folder.path("python"), "m:f", "decode-ones");
  EXPECT_EQ(none.status, 3);
  EXPECT_THAT(none.err, HasSubstr("python cannot be started: No such file"));
  const std::string bare =
      folder.write("bare",
                   "#!/bin/sh\nexec python3 -c 'import sys; sys.modules[\"torch\"] = None; "
                   "sys.argv = sys.argv[1:]; exec(open(sys.argv[0]).read())' \"$@\"\n");
  std::filesystem::permissions(bare, std::filesystem::perms::owner_all);
  const ProgramRun run = judged_by(bare, "m:f", "decode-ones");
  EXPECT_EQ(run.status, 3) << run.out;
  EXPECT_THAT(run.err, HasSubstr("has no PyTorch"));
  EXPECT_THAT(run.err, HasSubstr("set LOCKSTEP_PYTHON to a Python that has it"));
}

TEST(Judge, badWordsAreRefusedInASentence) {
  const auto complaint = [](const std::vector<std::string>& words, int status) {
    std::vector<std::string> all{"judge"};
    all.insert(all.end(), words.begin(), words.end());
    const ProgramRun run = run_program(all);
    EXPECT_EQ(run.status, status) << run.out << run.err;
    return run.err;
  };
  EXPECT_THAT(complaint({"softmax", "--candidate", "a:b"}, 2),
              HasSubstr("`softmax` cannot be judged; what can is"));
  EXPECT_THAT(complaint({kDelta, "--candidate", "nothing"}, 2), HasSubstr("MODULE:FUNCTION"));
  EXPECT_THAT(complaint({kDelta, "--candidate", "missing.so:f"}, 2), HasSubstr("no such file"));
  EXPECT_THAT(complaint({kDelta, "--candidate", library("nobody"), "--device", "cpu"}, 2),
              HasSubstr("exports no function `nobody`"));
  if (!std::filesystem::exists("/dev/nvidia0")) {
    EXPECT_THAT(complaint({kDelta, "--candidate", library("gdn_right"), "--device", "cuda"}, 3),
                HasSubstr("--device cuda"));
  }
  EXPECT_THAT(complaint({kDelta, "--candidate", library("gdn_right"), "--types", "int4"}, 2),
              HasSubstr("--types `int4`"));
  EXPECT_THAT(complaint({kDelta, "--candidate", library("gdn_right"), "--case", "x"}, 2),
              HasSubstr("the cases of gated_delta_rule_update are decode, "));
  EXPECT_THAT(
      complaint(
          {kDelta, "--candidate", library("gdn_right"), "--device", "cpu", "--batch", "1000000000"},
          2),
      HasSubstr("--batch 1000000000: the timed cases of gated_delta_rule_update need about"));
}

// Everything but the time is a function of the seed.
TEST(Judge, theJsonIsTheSameTwice) {
  const ScratchFolder folder;
  nlohmann::json documents[2];
  for (int i = 0; i < 2; ++i) {
    const std::string path = folder.path(std::to_string(i));
    const ProgramRun run =
        judged(kDelta, "gdn_no_scale", {"--json", path, "--seed", "7", "--case", "decode-odd"});
    EXPECT_EQ(run.status, 11) << run.err;
    documents[i] = nlohmann::json::parse(read_text(path));
    EXPECT_TRUE(documents[i].at("timing").contains("wall_s"));
    documents[i].erase("timing");
  }
  EXPECT_EQ(documents[0], documents[1]);
  EXPECT_EQ(documents[0].at("verdict"), "finding");
  EXPECT_EQ(documents[0].at("agrees_with").at(0).at("mistake"), "no-scale");
  EXPECT_EQ(documents[0].at("findings").at(0).at("kind"), "output-differs");
}

// A floor is of counted bytes and a measured rate, and the text says of what.
TEST(Judge, theTimeStandsBesideTheFloor) {
  const ScratchFolder folder;
  const std::string path = folder.path("json");
  const ProgramRun run =
      run_program({"judge", kDelta, "--candidate", library("gdn_right"), "--device", "cpu",
                   "--case", "serving-in-order", "--batch", "1", "--json", path});
  EXPECT_EQ(run.status, 0) << run.out << run.err;
  EXPECT_THAT(run.out, HasSubstr("The floor of a CPU is"));
  const auto document = nlohmann::json::parse(read_text(path));
  const auto& speed = document.at("timing").at("speed").at(0);
  // One row: a state of 32 x 128 x 128 floats in and out, and the token.
  EXPECT_EQ(speed.at("bytes"), 2 * 32 * 128 * 128 * 4 + 2 * (2 * 16 + 2 * 32) * 128 + 2 * 32 * 4);
  EXPECT_GT(speed.at("time_us"), 0.0);
  EXPECT_NEAR(speed.at("limit_share").get<double>(),
              speed.at("floor_us").get<double>() / speed.at("time_us").get<double>(), 1e-9);
}

}  // namespace
}  // namespace lockstep
