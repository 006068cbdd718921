// The cost of a step from recorded times: a recorded case costs what was recorded, work between
// cases lies between their times, and what no case covers counts as modelled.
#include "cache_sim/model/measured_step_cost.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <tuple>

#include "cache_sim/compare/comparison_json.hpp"
#include "properties/support/program.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {
namespace {

using namespace testing_support;

const std::string kReports = std::string(LOCKSTEP_SOURCE_DIR) + "/reports/kernels";

/// The entries of an operation, one for each card that it was measured on.
std::vector<Json> entries_of(const std::string& operation) {
  return Json::parse(read_text(kReports + "/" + operation + ".json")).at("chips");
}

/// A card that an operation was measured on.
std::string card_of(const std::string& operation) {
  return entries_of(operation).front().at("gpu");
}

Json entry_of(const std::string& operation, const std::string& gpu) {
  for (const Json& entry : entries_of(operation))
    if (entry.at("gpu") == gpu) return entry;
  require(false, operation + " was not measured on " + gpu);
  return {};
}

/// The costs of a model's steps, and how they divide.
struct Costs {
  std::vector<CostPart> parts;
  Model model;
  MeasuredStepCost cost;

  Costs(const std::string& name, std::string_view card, const std::string& folder = kReports)
      : model(**find_model(name)), cost(model, layers(model, card, folder), parts) {}

  static std::shared_ptr<const MeasuredLayers> layers(const Model& model, std::string_view card,
                                                      const std::string& folder) {
    Result<MeasuredLayers> read = MeasuredLayers::read(model, card, folder);
    require(read.has_value(), read ? "" : read.error().text);
    return std::make_shared<const MeasuredLayers>(std::move(*read));
  }

  /// The time of one step in a part.
  CostPart part(const std::string& name, const StepWork& work) {
    for (CostPart& part : parts) part = {.name = part.name};
    cost.of(work);
    for (const CostPart& part : parts)
      if (part.name == name) return part;
    ADD_FAILURE() << "there is no part " << name;
    return {};
  }
};

StepWork decodes(std::int64_t rows, std::int64_t length = 1) {
  return {
      .decode_tokens = rows, .context_tokens = rows * (length - 1), .seen_tokens = rows * length};
}

StepWork prompt(std::int64_t tokens, std::int64_t prefix = 0) {
  return {.prefill_tokens = tokens,
          .context_tokens = prefix,
          .seen_tokens = tokens * prefix + tokens * (tokens + 1) / 2};
}

Nanoseconds nanoseconds(const Json& row) {
  return std::llround(row.at("time_us").get<double>() * 1000);
}

// --- Recorded cases ------------------------------------------------------------------------------

struct Recorded {
  const char* model;
  const char* operation;
  const char* form;  ///< of scanf
};

TEST(MeasuredStepCosts, aRecordedCaseCostsWhatWasRecorded) {
  const std::vector<Recorded> all = {
      {"nemotron-h", "selective_state_update", "B=%d H=128 P=64 N=128 G=8 state fp32%n"},
      {"nemotron-h", "ssd_prefill", "T=%d H=128 P=64 N=128 G=8%n"},
      {"qwen3-next", "gated_delta_rule_update", "B=%d H=16 HV=32 K=V=128 state fp32%n"},
      {"qwen3-next", "gated_delta_rule_prefill", "T=%d H=16 HV=32 K=V=128%n"},
      {"qwen3-next", "causal_conv1d_update", "B=%d D=8192 W=4 bf16%n"},
      {"qwen3-next", "causal_conv1d", "T=%d D=8192 W=4 bf16%n"},
      {"deepseek-v3", "mla_decode", "H=128 B=%d L=%d%n"},
      {"deepseek-v3", "mla_prefill", "H=128 T=%d%n"},
      {"deepseek-v3", "mla_prefill", "H=128 T=%d over %d of a prefix%n"},
  };
  for (const Recorded& one : all) {
    const std::string_view form = one.form;
    const bool is_decode = form.find("B=") != std::string_view::npos;
    const bool has_two = form.find("%d") != form.rfind("%d");
    for (const Json& entry : entries_of(one.operation)) {
      const std::string gpu = entry.at("gpu");
      Costs costs(one.model, gpu);
      const std::int64_t layers =
          costs.model.state_layers > 0 ? costs.model.state_layers : costs.model.attention_layers;
      int cases = 0;
      for (const Json& row : entry.at("speed")) {
        const std::string text = row.at("case");
        int first = 0, second = is_decode ? 1 : 0, end = 0;
        has_two ? std::sscanf(text.c_str(), one.form, &first, &second, &end)
                : std::sscanf(text.c_str(), one.form, &first, &end);
        if (end != static_cast<int>(text.size())) continue;
        ++cases;
        const CostPart part =
            costs.part(one.operation, is_decode ? decodes(first, second) : prompt(first, second));
        EXPECT_EQ(part.measured, layers * nanoseconds(row)) << gpu << ": " << text;
        EXPECT_EQ(part.modelled, 0) << gpu << ": " << text;
      }
      EXPECT_GT(cases, 0) << one.operation << " on " << gpu << ": " << one.form;
    }
  }
}

TEST(MeasuredStepCosts, liesOnTheLineBetweenTwoCases) {
  Costs costs("nemotron-h", card_of("ssd_prefill"));
  const Nanoseconds low = costs.part("ssd_prefill", prompt(2048)).measured;
  const Nanoseconds high = costs.part("ssd_prefill", prompt(8192)).measured;
  EXPECT_NEAR(static_cast<double>(costs.part("ssd_prefill", prompt(5120)).measured),
              static_cast<double>(low + high) / 2, 24);
}

// Nothing is extrapolated: the work beside the recorded cases is modelled, and costs no less than
// the largest case below it.
TEST(MeasuredStepCosts, countsWhatNoCaseCoversAsModelled) {
  Costs nemotron("nemotron-h", card_of("ssd_prefill"));
  Costs decode("deepseek-v3", card_of("mla_decode"));
  Costs prefill("deepseek-v3", card_of("mla_prefill"));
  const auto modelled = [](Costs& costs, const std::string& name, const StepWork& work) {
    const CostPart part = costs.part(name, work);
    EXPECT_EQ(part.measured, 0) << name;
    EXPECT_GT(part.modelled, 0) << name;
    return part.modelled;
  };
  EXPECT_GE(modelled(nemotron, "selective_state_update", decodes(1025)),
            nemotron.part("selective_state_update", decodes(1024)).measured);
  modelled(nemotron, "ssd_prefill", prompt(2047));
  modelled(nemotron, "ssd_prefill", prompt(131073));
  modelled(nemotron, "attention", decodes(8, 100));
  modelled(nemotron, "weights", decodes(8, 100));
  modelled(decode, "mla_decode", decodes(32, 1023));
  modelled(decode, "mla_decode", decodes(129, 1024));
  modelled(prefill, "mla_prefill", prompt(16, 200'000));
  StepWork rows = prompt(512);  // eight of these
  for (std::int64_t* const count : {&rows.prefill_tokens, &rows.seen_tokens}) *count *= 8;
  modelled(prefill, "mla_prefill", rows);
  StepWork both = prompt(2048);
  ++both.decode_tokens;
  modelled(prefill, "attention", both);
  EXPECT_EQ(prefill.part("mla_prefill", both).measured, 0);
  EXPECT_EQ(prefill.part("mla_decode", both).modelled, 0);
}

TEST(MeasuredStepCosts, growWithTheBatch) {
  for (const char* const name : {"nemotron-h", "qwen3-next"}) {
    Costs costs(name, card_of("ssd_prefill"));
    for (const auto& work : {+[](std::int64_t i) { return decodes(i, 1000); },
                             +[](std::int64_t i) { return prompt(97 * i); }})
      for (Nanoseconds last = 0, i = 1; i < 2000; ++i) {
        const Nanoseconds time = costs.cost.of(work(i));
        ASSERT_GE(time, last) << name << ": " << i;
        last = time;
      }
  }
  Costs costs("deepseek-v3", card_of("mla_decode"));
  for (const std::int64_t length : {1, 1000, 1024, 3000, 16384, 50000})
    for (Nanoseconds last = 0, rows = 1; rows < 300; ++rows) {
      const Nanoseconds time = costs.cost.of(decodes(rows, length));
      ASSERT_GE(time, last) << rows << " rows of " << length;
      last = time;
    }
}

TEST(MeasuredStepCosts, partsAddUpToTheStep) {
  Costs costs("qwen3-next", card_of("causal_conv1d"));
  for (const StepWork& work :
       {decodes(40, 900), prompt(3000, 500), StepWork{100, 20, 5000, 40000}}) {
    for (CostPart& part : costs.parts) part = {.name = part.name};
    const Nanoseconds step = costs.cost.of(work);
    Nanoseconds sum = 0;
    for (const CostPart& part : costs.parts) sum += part.measured + part.modelled;
    EXPECT_EQ(step, sum);
  }
}

// --- Evidence ------------------------------------------------------------------------------------

constexpr const char* kH100 = "NVIDIA H100 80GB HBM3";
constexpr const char* kH200 = "NVIDIA H200";

/// A folder with the evidence of nemotron-h's kernels on an H200, each entry changed by `change`.
/// The times of a second card, if one is named, are three times as long.
template <class Change>
std::string changed_evidence(const ScratchFolder& folder, const Change& change,
                             const char* second = nullptr) {
  for (const char* const operation : {"selective_state_update", "ssd_prefill"}) {
    Json entries = Json::array({entry_of(operation, kH200)});
    change(operation, entries[0]);
    if (second != nullptr) {
      entries.push_back(Json(entries[0]));
      entries[1]["gpu"] = second;
      for (Json& row : entries[1]["speed"]) row["time_us"] = 3 * row["time_us"].get<double>();
    }
    folder.write(fmt::format("{}.json", operation), Json{{"chips", entries}}.dump());
  }
  const std::string path = folder.path("");
  return path.substr(0, path.size() - 1);
}

TEST(MeasuredStepCosts, twiceTheTimesGiveTwiceTheMeasuredPart) {
  const ScratchFolder folder;
  const std::string twice = changed_evidence(folder, [](const std::string&, Json& entry) {
    for (Json& row : entry["speed"]) row["time_us"] = 2 * row["time_us"].get<double>();
  });
  Costs one("nemotron-h", card_of("ssd_prefill")), two("nemotron-h", "H200", twice);
  for (const std::int64_t rows : {1, 7, 16, 40, 1024}) {
    const CostPart a = one.part("selective_state_update", decodes(rows));
    const CostPart b = two.part("selective_state_update", decodes(rows));
    EXPECT_NEAR(static_cast<double>(b.measured), static_cast<double>(2 * a.measured), 24);
    EXPECT_EQ(one.part("weights", decodes(rows)).modelled,
              two.part("weights", decodes(rows)).modelled);
  }
}

// A file with two cards gives each its own times.
TEST(MeasuredStepCosts, eachCardHasTheTimesOfItsEntry) {
  const ScratchFolder folder;
  const std::string both = changed_evidence(
      folder, [](const std::string&, Json&) {}, kH100);
  for (const auto& [card, gpu, times] :
       {std::tuple("H200", kH200, 1), std::tuple("H100", kH100, 3)}) {
    Costs costs("nemotron-h", card, both), alone("nemotron-h", kH200);
    for (const std::int64_t rows : {1, 16, 1024})
      EXPECT_NEAR(
          static_cast<double>(costs.part("selective_state_update", decodes(rows)).measured),
          static_cast<double>(times * alone.part("selective_state_update", decodes(rows)).measured),
          24);
    const Result<MeasuredLayers> layers =
        MeasuredLayers::read(**find_model("nemotron-h"), card, both);
    ASSERT_TRUE(layers) << layers.error().text;
    EXPECT_EQ(layers->gpu, gpu);
    ASSERT_EQ(layers->evidence.size(), 2u);
    for (const KernelEvidence& one : layers->evidence) EXPECT_EQ(one.gpu, gpu);
  }
}

// Two cards are never mixed.
TEST(MeasuredStepCosts, aKernelOfAnotherCardIsModelled) {
  const ScratchFolder folder;
  const std::string mixed = changed_evidence(folder, [](const std::string& operation, Json& entry) {
    if (operation == "ssd_prefill") entry["gpu"] = kH100;
  });
  for (const auto& [card, measured, modelled] :
       {std::tuple("H200", "selective_state_update", "ssd_prefill"),
        std::tuple("H100", "ssd_prefill", "selective_state_update")}) {
    Costs costs("nemotron-h", card, mixed);
    StepWork work = prompt(4096);
    work.decode_tokens = 20;
    EXPECT_GT(costs.part(measured, work).measured, 0) << card;
    EXPECT_EQ(costs.part(modelled, work).measured, 0) << card;
    EXPECT_GT(costs.part(modelled, work).modelled, 0) << card;
  }
}

TEST(MeasuredStepCosts, badEvidenceIsRefusedByFileAndField) {
  struct Bad {
    std::string card;
    void (*change)(const std::string& operation, Json& entry);
    std::string says;
    const char* second = nullptr;
  };
  const auto same = [](const std::string&, Json&) {};
  const std::vector<Bad> all = {
      {"H100", same, "selective_state_update.json: field gpu: `NVIDIA H200`"},
      {"B200", same, "field gpu: `NVIDIA H200 and NVIDIA H100 80GB HBM3`", kH100},
      {"H20", same, "was measured on H20"},
      {"", same, "field gpu"},
      {"NVIDIA",
       [](const std::string& operation, Json& entry) {
         if (operation == "ssd_prefill") entry["gpu"] = kH100;
       },
       "ssd_prefill.json:1: field chips[0].gpu: `NVIDIA H100 80GB HBM3`, where an earlier file has "
       "`NVIDIA H200`: NVIDIA stands for two cards"},
      {"H200", same,
       "selective_state_update.json:1: field chips[1].gpu: `NVIDIA H200` beside an entry of "
       "`NVIDIA H200`: H200 stands for two cards",
       kH200},
      {"H200", [](const std::string&, Json& entry) { entry.erase("gpu"); }, "field chips[0].gpu"},
      {"H200", [](const std::string&, Json& entry) { entry.erase("commit"); },
       "field chips[0].commit"},
      {"H200", [](const std::string&, Json& entry) { entry["read_gbps"] = 0; },
       "field chips[0].read_gbps: 0 is not between"},
      {"H200", [](const std::string&, Json& entry) { entry["speed"] = Json::array(); },
       "field chips[0].speed: no `case` has the form `B={} H=128 P=64 N=128 G=8 state fp32`"},
      {"H200", [](const std::string&, Json& entry) { entry["speed"][0]["time_us"] = "fast"; },
       "field chips[0].speed[0].time_us"},
      {"H200",
       [](const std::string&, Json& entry) { entry["speed"].push_back(Json(entry["speed"][0])); },
       "are no grid"},
  };
  for (const Bad& bad : all) {
    const ScratchFolder folder;
    const Result<MeasuredLayers> read = MeasuredLayers::read(
        **find_model("nemotron-h"), bad.card, changed_evidence(folder, bad.change, bad.second));
    ASSERT_FALSE(read) << bad.says;
    EXPECT_NE(read.error().text.find(bad.says), std::string::npos) << bad.says << "\n"
                                                                   << read.error().text;
  }
  const ScratchFolder folder;
  folder.write("selective_state_update.json", R"({"chips": []})");
  const std::string path = folder.path("");
  const Result<MeasuredLayers> read =
      MeasuredLayers::read(**find_model("nemotron-h"), "H200", path.substr(0, path.size() - 1));
  ASSERT_FALSE(read);
  EXPECT_NE(read.error().text.find("field chips: the entry of a card is missing"),
            std::string::npos)
      << read.error().text;
}

// --- The command ---------------------------------------------------------------------------------

TEST(MeasuredStepCosts, compareSaysWhatIsMeasuredAndFromWhere) {
  const ScratchFolder folder;
  const auto compared = [&](const std::string& evidence, const std::string& name) {
    const ProgramRun run = run_program(
        {"compare", "sessions:requests=60", "--policies", "kv-bound,sglang-no-buffer", "--capacity",
         "8GiB", "--model", "nemotron-h", "--cost", "measured:H200", "--evidence", evidence,
         "--json", folder.path(name), "--html", folder.path("page.html")});
    EXPECT_EQ(run.status, kExitPass) << run.err;
    EXPECT_NE(
        run.out.find("are measured on NVIDIA H200: " + evidence + "/ssd_prefill.json, commit"),
        std::string::npos)
        << run.out;
    EXPECT_NE(run.out.find("are measured (selective_state_update"), std::string::npos) << run.out;
    const std::string page = read_text(folder.path("page.html"));
    EXPECT_NE(page.find("of the steps’ time measured"), std::string::npos);
    EXPECT_NE(page.find("/ssd_prefill.json, commit"), std::string::npos);
    return Json::parse(read_text(folder.path(name)));
  };
  const Json json = compared("reports/kernels", "one.json");
  EXPECT_EQ(json["cost"]["gpu"], "NVIDIA H200");
  ASSERT_EQ(json["cost"]["evidence"].size(), 2u);
  EXPECT_EQ(json["cost"]["evidence"][1]["commit"], entry_of("ssd_prefill", kH200)["commit"]);
  EXPECT_FALSE(json["policies"][0].contains("measured_share")) << "an ideal policy takes no steps";
  const Json& row = json["policies"][1];
  EXPECT_GT(row["output_tokens_per_s"], 0.0);
  EXPECT_GT(row["measured_share"], 0.0);
  EXPECT_LT(row["measured_share"], 1.0);
  const auto measured = [](const Json& of) {
    std::int64_t sum = 0;
    for (const Json& part : of["step_time"]) sum += part["measured_ns"].get<std::int64_t>();
    return sum;
  };
  EXPECT_GT(measured(row), 0);

  const ScratchFolder slow;
  const std::string evidence = changed_evidence(slow, [](const std::string&, Json& entry) {
    for (Json& one : entry["speed"]) one["time_us"] = 100 * one["time_us"].get<double>();
  });
  const Json other = compared(evidence, "slow.json")["policies"][1];
  EXPECT_GT(other["ttft"]["mean_ns"], row["ttft"]["mean_ns"]);
  EXPECT_LT(other["output_tokens_per_s"], row["output_tokens_per_s"]);
}

TEST(MeasuredStepCosts, badWordsAreRefused) {
  struct Bad {
    std::vector<std::string> words;
    std::string says;
  };
  const std::vector<Bad> all = {
      {{"--cost", "measured"}, "--cost: `measured` is neither `model` nor `measured:CARD`"},
      {{"--cost", "measured:B200"},
       "was measured on B200: reports/kernels/gated_delta_rule_update"},
      {{"--cost", "measured:H200", "--model", "tiny-mla"}, "at the sizes of model tiny-mla"},
      {{"--cost", "measured:H200", "--evidence", "nowhere"},
       "nowhere/gated_delta_rule_update.json"},
      {{"--cost", "measured:H200", "--config", "step_time=3ms"}, "--cost: step_time="},
      {{"--cost", "measured:H200", "--policies", "radix@step_time=3ms"}, "--cost: step_time="},
      {{"--cost", "measured:H200", "--policies", "vllm-align", "--config", "drafts=3"},
       "policy vllm-align: drafts=3: --cost measured:H200 knows no verification"},
  };
  for (const Bad& bad : all) {
    std::vector<std::string> words{"compare", "sessions:requests=3"};
    if (std::ranges::find(bad.words, "--policies") == bad.words.end())
      words.insert(words.end(), {"--policies", "sglang-no-buffer"});
    words.insert(words.end(), bad.words.begin(), bad.words.end());
    const ProgramRun run = run_program(words);
    EXPECT_EQ(run.status, kExitBadInput) << bad.says;
    EXPECT_NE(run.err.find(bad.says), std::string::npos) << bad.says << "\n" << run.err;
  }
}

}  // namespace
}  // namespace lockstep::cache_sim
