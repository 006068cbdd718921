// The common part of the schedulers: they ask the subject one question at a time, and keep the
// lists of requests that wait, run and have ended. The scheduling rules are in the derived classes.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "reference/base/require.hpp"
#include "reference/protocol/schedule.hpp"

namespace lockstep::cache_sim {

enum class RequestState : std::uint8_t { expected, waiting, running, ended };

/// The state of a request that every scheduler keeps.
struct ServedRequest {
  const RequestSpec* spec = nullptr;  ///< null while the request has not arrived
  RequestState state = RequestState::expected;
  std::uint32_t sampled = 0;  ///< tokens whose results have come
};

/// `Request` is a ServedRequest with more fields for the rules. `Asked` is an enum that says why an
/// operation was asked for; it has the values `nothing` and `drop`.
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
  void recycle(RequestNumber request) final { requests_[request] = Request{}; }

 protected:
  /// Handles every event but a reply.
  virtual void hear(const SchedulerEvent& event, SchedulerEffects& effects) = 0;
  virtual void settle(Asked asked, const Reply& reply, SchedulerEffects& effects) = 0;
  /// Goes on until an operation is asked for, or until time has to pass.
  virtual void next(SchedulerEffects& effects) = 0;

  /// The record of a request that has arrived; null where its client left before.
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

  /// Ends a request before its output is complete. The subject is told of it if the request runs.
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
  /// Ends a request whose output is complete.
  void end(RequestNumber request, SchedulerEffects& effects) {
    end(request, requests_[request].spec->stops ? FinishReason::stop : FinishReason::length,
        effects);
  }

  /// An operation whose fields are set as far as they follow from the verb; the caller sets the
  /// others.
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
  SchedulerEffects effects_;  // reused by all steps, so that a step allocates nothing
  Operation operation_;       // likewise
};

}  // namespace lockstep::cache_sim
