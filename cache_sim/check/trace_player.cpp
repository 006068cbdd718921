#include "cache_sim/check/trace_player.hpp"

#include <fmt/format.h>

#include <string>
#include <variant>

#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

void play_operations(ReplaySession& run, const Trace& trace) {
  for (const Statement& statement : trace.statements) {
    run.set_place(statement.line, 0);
    const auto* const operation = std::get_if<Operation>(&statement.what);
    require(operation != nullptr, "the trace has operations alone");
    if (run.options().config.ranks > 1)
      return run.fail({.text = "config ranks is for files with request lines"});
    const Applied applied = run.apply(*operation);
    if (run.stopped()) return;
    if (!applied.left_out) check_answer(run, statement, *applied.reply);
  }
  run.set_place(0, 0);
  run.conclude();
}

void check_answer(ReplaySession& run, const Statement& statement, const Reply& reply) {
  // A child may leave out a field of its answer.
  const bool may_be_silent = std::holds_alternative<Operation>(statement.what) &&
                             run.first_is_child() && reply.refused == Refusal::none;
  for (const AnswerField& due : statement.answer) {
    std::string actual = "nothing";
    if (due.field == "refused") {
      if (reply.refused != Refusal::none) actual = to_string(reply.refused);
    } else if (const auto field = reply_field_from(due.field); field && reply.has(*field)) {
      actual = reply.value_text(*field);
    }
    if (actual == due.value) continue;
    if (actual == "nothing" && may_be_silent && due.field != "refused") continue;
    run.set_place(statement.answer_line, run.now());
    Finding finding = {
        FindingKind::answer_differs,
        fmt::format("the answer should carry {}={} and carries {}", due.field, due.value,
                    actual == "nothing" ? "no such field" : due.field + "=" + actual),
        due.field + "=" + due.value, due.field + "=" + actual};
    if (const auto* const expect = std::get_if<Expect>(&statement.what))
      run.add_about(expect->id, due.field == to_string(ReplyField::cached), std::move(finding));
    else
      run.add(std::move(finding), "", false);
  }
}

}  // namespace lockstep::cache_sim
