// What the schedulers of this folder share: one question at a time, and who waits, runs and has
// ended. The rules are in the derived classes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "reference/base/require.hpp"
#include "reference/protocol/schedule.hpp"

namespace lockstep::cache_sim {

enum class RequestState : std::uint8_t { expected, waiting, running, ended };

/// What every scheduler knows of a request.
struct ServedRequest {
  const RequestSpec* spec = nullptr;  ///< none while it is expected
  RequestState state = RequestState::expected;
  std::uint32_t sampled = 0;  ///< tokens whose results are there
};

/// `Request` is a ServedRequest with what the rules need besides; `Asked` says what an operation
/// was asked for, and has `nothing` and `drop`.
template <class Request, class Asked, class Options = SchedulerOptions>
class AskingScheduler : public ServerScheduler {
 public:
  explicit AskingScheduler(Options options) : options_(std::move(options)) {}

  const SchedulerEffects& step(const SchedulerEvent& event) final {
    effects_.operation = nullptr;
    effects_.forward.reset();
    effects_.notes.clear();
    effects_.idle = false;
    const bool is_reply = event.kind == SchedulerEvent::Kind::reply;
    require(is_reply == (asked_ != Asked::nothing),
            "a reply answers an operation, before anything else happens");
    if (is_reply)
      settle(std::exchange(asked_, Asked::nothing), *event.reply, effects_);
    else
      hear(event, effects_);
    next(effects_);
    return effects_;
  }

  std::size_t load() const final { return waiting_.size() + running_.size(); }
  bool ended(RequestNumber request) const final {
    return request < requests_.size() && requests_[request].state == RequestState::ended;
  }

 protected:
  /// Anything but a reply.
  virtual void hear(const SchedulerEvent& event, SchedulerEffects& effects) = 0;
  virtual void settle(Asked asked, const Reply& reply, SchedulerEffects& effects) = 0;
  /// Goes on until there is something to ask or time has to pass.
  virtual void next(SchedulerEffects& effects) = 0;

  /// The record of a request that has come. None where its client went before.
  Request* arrive(const SchedulerEvent& event) {
    Request& request = record(event.request);
    if (request.state == RequestState::ended) return nullptr;
    require(request.state == RequestState::expected, "a request arrives once");
    request.spec = event.spec;
    request.state = RequestState::waiting;
    return &request;
  }

  Request& record(RequestNumber request) {
    if (requests_.size() <= request) requests_.resize(request + 1);
    return requests_[request];
  }

  void abort(RequestNumber request, SchedulerEffects& effects) {
    if (record(request).state != RequestState::ended) drop(request, FinishReason::abort, effects);
  }

  /// Whoever runs is known to the subject, which has to be told.
  void drop(RequestNumber request, FinishReason reason, SchedulerEffects& effects) {
    if (requests_[request].state == RequestState::running) {
      drop_reason_ = reason;
      ask(Verb::abort, request, Asked::drop, effects);
      return;
    }
    std::erase(waiting_, request);
    end(request, reason, effects);
  }

  void end(RequestNumber request, FinishReason reason, SchedulerEffects& effects) {
    requests_[request].state = RequestState::ended;
    effects.notes.push_back(
        {SchedulerNote::Kind::ended, request, reason, requests_[request].sampled});
  }
  /// Its output is complete.
  void end(RequestNumber request, SchedulerEffects& effects) {
    end(request, requests_[request].spec->stops ? FinishReason::stop : FinishReason::length,
        effects);
  }

  /// The operation, with what follows from its verb; the caller fills in the rest.
  Operation& ask(Verb verb, RequestNumber request, Asked asked, SchedulerEffects& effects) {
    Operation& operation = operation_;
    operation.verb = verb;
    operation.id = operation.salt = operation.lora = Name();
    operation.tokens = operation.drafts = Tokens();
    operation.n = operation.prompt = operation.up_to = operation.room = Operation::kAbsent;
    operation.external = operation.padded = Operation::kAbsent;
    operation.parents.clear();
    operation.images.clear();
    operation.async = false;
    operation.ids.clear();
    asked_ = asked;
    subject_of_ask_ = request;
    if (verb != Verb::step && verb != Verb::evict) operation.id = requests_[request].spec->id;
    if (verb == Verb::admit) {
      const Request& waiting = requests_[request];
      operation.salt = waiting.spec->salt;
      operation.lora = waiting.spec->lora;
      for (const RequestSpec::Image& image : waiting.spec->images)
        if (image.name.exists()) operation.images.push_back(image);
      operation.tokens = waiting.spec->tokens.prefix(waiting.spec->prompt_size + waiting.sampled);
      operation.prompt = waiting.spec->prompt_size;
    }
    effects.operation = &operation;
    return operation;
  }

  Options options_;
  std::vector<Request> requests_;
  std::deque<RequestNumber> waiting_;
  std::vector<RequestNumber> running_;  // in order of admission
  Asked asked_ = Asked::nothing;
  RequestNumber subject_of_ask_ = 0;
  FinishReason drop_reason_ = FinishReason::abort;

 private:
  SchedulerEffects effects_;  // filled anew by each step, as is the operation:
  Operation operation_;       // nothing is allocated for either
};

}  // namespace lockstep::cache_sim
