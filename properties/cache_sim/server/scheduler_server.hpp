// A scheduler whose subject's answers are made by hand, and the scheduler's oracle, which hears all
// that is said.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reference/base/registry.hpp"
#include "reference/protocol/schedule.hpp"

namespace lockstep::cache_sim {

inline RequestSpec spec_of(const std::string& id, std::uint32_t prompt, std::uint32_t output) {
  RequestSpec spec;
  spec.id = Name::intern(id);
  spec.tokens = Tokens::of_document(1, 0, prompt).followed_by(Tokens::of_document(2, 0, output));
  spec.prompt_size = prompt;
  return spec;
}

/// A scheduler with a subject that says yes unless told otherwise, and everything that was said.
class Server {
 public:
  explicit Server(const Config& config) : Server(config, config) {}
  /// The oracle judges by other rules.
  Server(const Config& config, const Config& judged_by)
      : scheduler_(Registry<SchedulerEntry>::find(scheduler_name(config))->make(config)),
        check_(Registry<ScheduleCheckerEntry>::find(scheduler_name(judged_by))->make(judged_by)) {}

  std::function<Reply(const Operation&)> answer = [](const Operation&) { return Reply{}; };
  std::function<void(SchedulerEpisode&)> spoil;  ///< what the check hears
  std::optional<Finding> finding;
  std::vector<std::string> notes;

  RequestNumber arrive(RequestSpec spec) {
    const auto number = static_cast<RequestNumber>(specs_.size());
    specs_.push_back(std::move(spec));
    play({.kind = SchedulerEvent::Kind::arrival, .request = number, .spec = &specs_.back()});
    return number;
  }
  RequestNumber arrive(const std::string& id, std::uint32_t prompt, std::uint32_t output) {
    return arrive(spec_of(id, prompt, output));
  }
  std::string abort(RequestNumber request) {
    return play({.kind = SchedulerEvent::Kind::abort, .request = request});
  }
  std::string retract(RequestNumber request) {
    return play({.kind = SchedulerEvent::Kind::retract, .request = request});
  }
  /// One whole step: what was asked, `verb:id` or `verb:id:n`, in order.
  std::string step() {
    forward.reset();
    std::string said;
    if (scheduler_->waits_for_results())
      said = play({.kind = SchedulerEvent::Kind::forward_done}) + "| ";
    said += play({.kind = SchedulerEvent::Kind::step_due});
    waited = scheduler_->awaits_results();
    if (waited) said += " |" + play({.kind = SchedulerEvent::Kind::forward_done});
    return said;
  }
  /// The two halves of a step.
  std::string decide() { return play({.kind = SchedulerEvent::Kind::step_due}); }
  std::string results() { return play({.kind = SchedulerEvent::Kind::forward_done}); }
  /// Notes since the last call.
  std::string news() {
    std::string all;
    for (const std::string& note : notes) all += (all.empty() ? "" : ", ") + note;
    notes.clear();
    return all;
  }
  bool has_work() const { return scheduler_->has_work(); }
  bool ended(RequestNumber request) const { return scheduler_->ended(request); }
  ServerScheduler& scheduler() { return *scheduler_; }

  std::optional<StepWork> forward;
  bool idle = false;
  bool waited = false;  ///< the last step brought results

 private:
  std::string play(SchedulerEvent event) {
    std::string said;
    Reply reply;
    SchedulerEpisode episode;
    episode.begin(event);
    for (;;) {
      const SchedulerEffects& effects = scheduler_->step(event);
      idle = effects.idle;
      if (effects.forward) forward = effects.forward;
      for (const SchedulerNote& note : effects.notes) notes.push_back(text(note));
      episode.add(effects);
      if (!effects.operation) break;
      said += (said.empty() ? "" : " ") + text(*effects.operation);
      reply = answer(*effects.operation);
      episode.asked.push_back({*effects.operation, reply});
      event = {.kind = SchedulerEvent::Kind::reply, .reply = &reply};
    }
    episode.status = scheduler_->status(episode.event.request);
    if (spoil) spoil(episode);
    if (!finding) finding = check_->check(episode);
    if (finding && !spoil) ADD_FAILURE() << finding->text;
    return said;
  }
  static std::string text(const Operation& operation) {
    std::string said(to_string(operation.verb));
    if (operation.id.exists()) said += ":" + operation.id.text();
    for (const Name id : operation.ids) said += ":" + id.text();
    if (operation.n != Operation::kAbsent) said += fmt::format(":{}", operation.n);
    if (operation.room != Operation::kAbsent) said += fmt::format(":room{}", operation.room);
    return said;
  }
  std::string text(const SchedulerNote& note) const {
    const std::string& id = specs_[note.request].id.text();
    switch (note.kind) {
      case SchedulerNote::Kind::admitted: return id + " admitted";
      case SchedulerNote::Kind::sampled: return fmt::format("{} has {}", id, note.output_tokens);
      case SchedulerNote::Kind::retracted: return id + " retracted";
      case SchedulerNote::Kind::ended:
        return fmt::format("{} ends: {}", id, to_string(note.reason));
    }
    return "";
  }

  std::unique_ptr<ServerScheduler> scheduler_;
  std::unique_ptr<ScheduleChecker> check_;
  std::deque<RequestSpec> specs_;  // addresses stay
};

}  // namespace lockstep::cache_sim
