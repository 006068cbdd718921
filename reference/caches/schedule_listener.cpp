#include "reference/caches/schedule_listener.hpp"
#include "reference/base/counted.hpp"

#include <fmt/format.h>

namespace lockstep::reference {
namespace {

constexpr std::size_t kTextLimit = 100;

/// Thrown at the end of what was recorded of an episode that has not ended.
struct HeardAll {};

bool same(const Operation& a, const Operation& b) {
  return a.verb == b.verb && a.id == b.id && a.salt == b.salt && a.lora == b.lora &&
         a.tokens == b.tokens && a.drafts == b.drafts && a.n == b.n && a.prompt == b.prompt &&
         a.up_to == b.up_to && a.room == b.room && a.kv == b.kv && a.state == b.state &&
         a.async == b.async && a.insert == b.insert && a.ids == b.ids && a.parents == b.parents &&
         a.external == b.external && a.padded == b.padded;
}

std::string text(const SchedulerNote& note) {
  constexpr std::string_view kKinds[] = {"admitted", "sampled", "retracted", "ended"};
  return fmt::format("request {} {} ({}, {})", note.request,
                     kKinds[static_cast<std::size_t>(note.kind)], to_string(note.reason),
                     counted(note.output_tokens, "token"));
}

std::string text(const std::optional<StepWork>& work) {
  if (!work) return "no forward";
  return fmt::format("prefill {}, decode {}, context {}, seen {}", work->prefill_tokens,
                     work->decode_tokens, work->context_tokens, work->seen_tokens);
}

std::string text(const SchedulerStatus& status) {
  return fmt::format("work {}, waits {}, out {}, awaits {}, load {}, ended {}", status.has_work,
                     status.waits_for_results, status.has_results_out, status.awaits_results,
                     status.load, status.has_ended);
}

}  // namespace

std::optional<Finding> ScheduleListener::check(const SchedulerEpisode& episode) try {
  episode_ = &episode;
  next_asked_ = next_note_ = 0;
  work_.reset();
  idle_ = false;
  play(episode.event);
  if (next_asked_ < episode.asked.size())
    report_difference("asks", "nothing more",
                      episode.asked[next_asked_].operation.text(kTextLimit));
  if (next_note_ < episode.notes.size())
    report_difference("says", "nothing more", text(episode.notes[next_note_]));
  if (text(work_) != text(episode.forward))
    report_difference("begins", text(work_), text(episode.forward));
  if (idle_ != episode.idle)
    report_difference("has", idle_ ? "nothing to do" : "something to do",
                      episode.idle ? "nothing to do" : "something to do");
  if (const SchedulerStatus due = status(episode.event.request); due != episode.status)
    report_difference("says of itself", text(due), text(episode.status));
  return std::nullopt;
} catch (const Parted& parted) {
  return parted.finding;
}

std::optional<Finding> ScheduleListener::check_so_far(const SchedulerEpisode& episode) const try {
  const std::unique_ptr<ScheduleListener> trial = copy();
  trial->is_whole_ = false;
  return trial->check(episode);
} catch (const HeardAll&) {
  return std::nullopt;
}

void ScheduleListener::report_difference(std::string_view what, std::string due, std::string came) {
  throw Parted{{FindingKind::schedule_differs,
                fmt::format("the scheduler {} `{}` where its rules say `{}`", what, came, due),
                std::move(due), std::move(came)}};
}

const Reply& ScheduleListener::ask(const Operation& due) {
  if (next_asked_ == episode_->asked.size()) {
    if (!is_whole_) throw HeardAll();
    report_difference("asks", due.text(kTextLimit), "nothing");
  }
  const SchedulerEpisode::Exchange& came = episode_->asked[next_asked_++];
  if (!same(due, came.operation))
    report_difference("asks", due.text(kTextLimit), came.operation.text(kTextLimit));
  return came.reply;
}

void ScheduleListener::note(const SchedulerNote& due) {
  if (next_note_ == episode_->notes.size()) {
    if (!is_whole_) throw HeardAll();
    report_difference("says", text(due), "nothing");
  }
  const SchedulerNote& came = episode_->notes[next_note_++];
  if (text(due) != text(came)) report_difference("says", text(due), text(came));
}

}  // namespace lockstep::reference
