// lockstep judge: compares somebody's kernel with the reference on edge cases.
#include <fmt/format.h>

#include "cache_sim/base/files.hpp"
#include "cache_sim/program/command.hpp"
#include "cache_sim/program/commands.hpp"
#include "cache_sim/program/output.hpp"
#include "cache_sim/program/progress.hpp"
#include "reference/base/judged.hpp"

namespace lockstep::program {
namespace {

struct JudgeWords {
  JudgeRequest request;
  std::string json_path;
};

std::string known_operations() {
  std::string names;
  for (const JudgedOperation& one : Registry<JudgedOperation>::all())
    names += (names.empty() ? "" : ", ") + std::string(one.name);
  return names;
}

Result<JudgeReport> judged(const JudgeRequest& request) {
  if (!has_judge()) return tl::unexpected(no_judge());
  const JudgedOperation* const operation = Registry<JudgedOperation>::find(request.operation);
  if (operation == nullptr)
    return fail(fmt::format("`{}` cannot be judged; what can is {}", request.operation,
                            known_operations()));
  return operation->judge(request);
}

int run_judge(const JudgeWords& words) {
  const Result<JudgeReport> report = [&] {
    Progress progress("judge " + words.request.operation);
    JudgeRequest request = words.request;
    request.progress = [&](std::string how_far) { progress.say(std::move(how_far)); };
    return judged(request);
  }();
  if (!report) return refuse(report.error());
  if (report->status != kExitPass || !is_quiet()) print_text(report->text);
  if (!words.json_path.empty())
    if (const Result<void> written = cache_sim::write_file(words.json_path, report->json); !written)
      return refuse(written.error());
  return report->status;
}

}  // namespace

bool has_judge() {
  return !Registry<JudgedOperation>::all().empty();
}

Error no_judge() {
  return {.text =
              "kernels are judged by the program lockstep-judge, which is not beside this one: "
              "`./lockstep judge` in a checkout builds it",
          .status = kExitEnvironment};
}

void add_judge(Command& app, int& status) {
  Command* const command = app.add_subcommand(
      "judge",
      "compare your kernel with the reference on edge cases: errors, stray writes, padding, speed");
  const auto words = std::make_shared<JudgeWords>();
  JudgeRequest& request = words->request;
  command->add_option("OPERATION", request.operation, "one of lockstep list operations")
      ->required();
  command
      ->add_option("--candidate", request.candidate,
                   "MODULE:FUNCTION or FILE.py:FUNCTION, a Python function with the operation's "
                   "schema, run by $LOCKSTEP_PYTHON (default: python3); or LIB.so:SYMBOL "
                   "(kernels/judge/judge_abi.h)")
      ->required();
  command->add_option("--device", request.device, "cpu, cuda, or auto: cuda where there is a GPU")
      ->one_of({"auto", "cpu", "cuda"})
      ->capture_default_str();
  command->add_option(
      "--types", request.types,
      "of activations and states, as bfloat16/float32 (default: those that servers use)");
  command->add_option("--case", request.only, "only cases whose name contains this (default: all)");
  command
      ->add_option("--batch", request.batch,
                   "rows of the timed cases (default: 64 on a GPU, 4 on a CPU)")
      ->number_from(1);
  command->add_option("--seed", request.seed, "the number that decides the cases' values")
      ->whole_number()
      ->capture_default_str();
  command->add_option("--timeout", request.timeout_s, "seconds for all cases together")
      ->number_from(1)
      ->capture_default_str();
  command->add_flag_callback(
      "--no-time", [&request] { request.timed = false; }, "judge errors alone, time nothing");
  command->add_flag("--batch-invariant", request.batch_invariant,
                    "also run rows alone and in other batches: each row's bits must stay the same");
  command->add_output("--json", words->json_path, "write the verdict's data to this file");
  add_quiet(*command);
  end_help(*command,
           {{kExitPass, "nothing found"},
            {kExitBadInput, "bad usage, or the candidate takes no case"},
            {kExitEnvironment, "the environment: no GPU, no PyTorch, a module that does not load"},
            {kExitPartial, "nothing found in the cases that it takes, fewer than half"},
            {kExitInvariant,
             "something was written or read that is not the operation's, or a row's "
             "bits depend on its batch"},
            {kExitDiffers, "outputs differ, or the candidate failed"},
            {kExitNondeterministic, "two runs differ"}},
           {"lockstep judge gated_delta_rule_update --candidate "
            "fixtures/candidates/torch_delta_rule.py:right --device cpu --no-time"});
  command->callback([words, &status] { status = run_judge(*words); });
}

}  // namespace lockstep::program
