// Prefill and decode apart, literally by the rules of disaggregation.md: two caches of
// sglang-no-buffer, and between them a list of transfers. Only lengths and counts move here: that
// what arrives is what was sent is by definition.
#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "reference/base/require.hpp"
#include "reference/caches/sglang_oracle.hpp"

namespace lockstep::reference {
namespace {

using Count = std::int64_t;

/// The config of the decode server, or of the prefill server as it is.
Config config_of(Config config, bool decodes) {
  if (!decodes) return config;
  if (const Count kv = config.number("decode_kv"); kv > 0) config.kv_tokens = kv;
  if (const Count states = config.number("decode_states"); states > 0) config.state_slots = states;
  return config;
}

class SglangPdOracle final : public Subject {
 public:
  explicit SglangPdOracle(const Config& config)
      : slices_(config.number("slices")),
        decode_kv_(config_of(config, true).kv_tokens),
        first_(config_of(config, false), {}),
        second_(config_of(config, true), {}) {}

  Result<Reply> apply(const Operation& operation) override {
    const std::string& id = operation.id.text();
    switch (operation.verb) {
      case Verb::admit: return admit(operation);
      case Verb::land:
      case Verb::fail: return end_copy(operation);
      case Verb::settle: return settle();
      case Verb::evict: return evict(operation);
      case Verb::flush:
        while (!flying_.empty()) finish_copy(flying_.front(), false);
        (void)settle();
        return on_both(operation);
      case Verb::check: return on_both(operation);
      case Verb::step: {
        if (operation.padded >= 0) return fail("two servers tell no rows of padding");
        return Reply();
      }
      case Verb::extend:
      case Verb::accept:
      case Verb::checkpoint:
      case Verb::finish:
      case Verb::abort:
      case Verb::preempt:
      case Verb::complete:
      case Verb::load: break;
      default: return fail("this is none of the operations of two servers");
    }
    const auto known = requests_.find(id);
    if (known == requests_.end() || known->second.is_gone)
      return fail(fmt::format("neither server has a request {}", id));
    Request& request = known->second;
    const bool goes = operation.verb == Verb::abort || operation.verb == Verb::preempt ||
                      (operation.verb == Verb::finish && !operation.insert);
    if (goes) return leave(operation, request);
    if (request.has_failed_for_good) return wait();
    if (request.is_moved) return on_second(operation);
    return on_first(operation, request);
  }

 private:
  struct Request {
    std::string id;
    Operation admission;
    Count transfer = 0;  ///< its number in the order of the first loads; 0: there was none
    Count computed = 0;  ///< tokens, by the prefill server
    Count sent = 0;
    Count own = 0;  ///< tokens of it that the decode server's cache has
    bool on_first = true, on_second = false;
    bool is_complete = false;          ///< everything is sent
    bool is_moved = false;             ///< [7]
    bool is_lost = false;              ///< a copy has failed
    bool has_failed_for_good = false;  ///< [8]
    bool is_gone = false;              ///< [9]
    std::set<Count> copies{};          ///< in flight
    Count last() const { return admission.tokens.size() - 1; }
  };

  static Reply wait() { return Reply::refusal(Refusal::same_step); }

  static Operation about(Verb verb, const Request& request) {
    Operation operation;
    operation.verb = verb;
    operation.id = request.admission.id;
    return operation;
  }

  // --- [1] Admissions ---------------------------------------------------------------------------

  Result<Reply> admit(const Operation& operation) {
    const auto known = requests_.find(operation.id.text());
    const bool is_busy = known != requests_.end();
    if (is_busy && !known->second.is_gone) return fail("a request of this name is there");
    const Count size = operation.tokens.size();
    if (operation.prompt > size) return fail("a prompt is no longer than the tokens");
    if (size < 2) return fail("each of the two servers computes a token");
    if (is_busy) return wait();
    if (size > decode_kv_) return Reply::refusal(Refusal::too_long);
    Operation without_last = operation;
    without_last.tokens = operation.tokens.prefix(static_cast<std::uint32_t>(size - 1));
    if (operation.prompt >= size) without_last.prompt = size - 1;
    Result<Reply> reply = first_.apply(without_last);
    if (!reply || reply->refused != Refusal::none) return reply;
    Request request{.id = operation.id.text(), .admission = operation};
    request.computed = reply->get(ReplyField::cached);
    requests_.emplace(operation.id.text(), std::move(request));
    return reply;
  }

  // --- Requests ---------------------------------------------------------------------------------

  Result<Reply> on_second(const Operation& operation) {
    if (operation.verb == Verb::load) return fail("it has moved already");
    Result<Reply> reply = second_.apply(operation);
    if (reply && operation.verb == Verb::finish) requests_.erase(operation.id.text());
    return reply;
  }

  Result<Reply> on_first(const Operation& operation, Request& request) {
    switch (operation.verb) {
      case Verb::extend: {
        if (request.is_complete) return wait();
        if (!operation.tokens.empty() || !operation.drafts.empty())
          return fail("outputs are the decode server's");
        Result<Reply> reply = first_.apply(operation);
        if (reply && reply->refused == Refusal::none) request.computed += reply->get(ReplyField::n);
        return reply;
      }
      case Verb::load: return load(request);
      case Verb::checkpoint:
        if (request.is_complete || row_is_read(request)) return wait();
        return first_.apply(operation);
      case Verb::finish: {
        if (request.on_second) return wait();
        Result<Reply> reply = first_.apply(operation);
        if (reply) requests_.erase(operation.id.text());
        return reply;
      }
      default: return first_.apply(operation);
    }
  }

  /// [4] A copy reads tokens of the row beyond those that the cache owns.
  bool row_is_read(const Request& request) const {
    return !request.copies.empty() && first_.owned_of(request.admission.id) < request.sent;
  }

  // --- [2] to [5] Loads -------------------------------------------------------------------------

  Result<Reply> load(Request& request) {
    if (request.is_complete) return wait();
    if (request.computed > 0 && !row_is_read(request))
      (void)first_.apply(about(Verb::checkpoint, request));
    Reply reply;
    if (!request.on_second) {
      Operation arrival = request.admission;
      arrival.external = request.last();
      arrival.room = Operation::kAbsent;
      const Result<Reply> taken = second_.apply(arrival);
      require(taken.has_value(), "the decode server knows no request of this name");
      if (taken->refused != Refusal::none) return Reply::refusal(taken->refused);
      request.on_second = true;
      request.transfer = ++transfers_;
      request.own = second_.owned_of(request.admission.id);
      reply.set(ReplyField::evicted_kv, taken->get(ReplyField::evicted_kv))
          .set(ReplyField::evicted_states, taken->get(ReplyField::evicted_states));
    }
    const Count tokens = std::max<Count>(0, request.computed - std::max(request.sent, request.own));
    request.is_complete = request.computed == request.last();
    if (tokens > 0 || request.is_complete)
      for (Count slice = 0; slice < slices_; ++slice) {
        flying_.push_back(++copies_);
        request.copies.insert(copies_);
      }
    request.sent = std::max(request.sent, request.computed);
    return reply.set(ReplyField::kv, tokens).set(ReplyField::state, request.is_complete ? 1 : 0);
  }

  // --- [6] Copies -------------------------------------------------------------------------------

  Request& owner_of(Count copy) {
    for (auto& [id, request] : requests_)
      if (request.copies.contains(copy)) return request;
    throw ContractViolation("a copy in flight is a request's");
  }

  void finish_copy(Count copy, bool fails) {
    Request& request = owner_of(copy);
    request.copies.erase(copy);
    std::erase(flying_, copy);
    if (fails && !request.has_failed_for_good && !request.is_gone) request.is_lost = true;
  }

  Result<Reply> end_copy(const Operation& operation) {
    const std::string from = operation.from.exists() ? operation.from.text() : "prefill";
    if (operation.tier.text() != "decode" || from != "prefill" || operation.rank >= 0)
      return fail("copies go from the prefill server to the decode server");
    std::optional<Count> copy;
    if (operation.id.exists()) {
      const auto known = requests_.find(operation.id.text());
      if (known == requests_.end()) return fail("neither server has this request");
      if (!known->second.copies.empty()) copy = *known->second.copies.begin();
    } else if (!flying_.empty()) {
      copy = flying_.front();
    }
    if (copy) finish_copy(*copy, operation.verb == Verb::fail);
    return Reply().set(ReplyField::n, copy ? 1 : 0);
  }

  // --- [7] to [9] Ends of transfers -------------------------------------------------------------

  Result<Reply> settle() {
    std::vector<Request*> transfers;
    for (auto& [id, request] : requests_)
      if (request.on_second && !request.is_moved) transfers.push_back(&request);
    std::ranges::sort(transfers,
                      [](const Request* a, const Request* b) { return a->transfer < b->transfer; });
    Count ended = 0;
    for (Request* const request : transfers) {
      const bool is_over = request->has_failed_for_good || request->is_gone;
      const bool all_here = request->is_complete && request->copies.empty();
      if (is_over ? !request->copies.empty() : !request->is_lost && !all_here) continue;
      ++ended;
      if (request->on_first) require(first_.apply(about(Verb::finish, *request)).has_value(), "");
      request->on_first = false;
      if (!is_over && !request->is_lost) {
        request->is_moved = true;
        continue;
      }
      request->has_failed_for_good = true;
      if (request->copies.empty()) release(*request);
    }
    return Reply().set(ReplyField::n, ended);
  }

  /// The decode server's slots of a request that does not move after all.
  void release(Request& request) {
    if (request.on_second) require(second_.apply(about(Verb::abort, request)).has_value(), "");
    request.on_second = false;
    if (request.is_gone) requests_.erase(std::string(request.id));
  }

  Result<Reply> leave(const Operation& operation, Request& request) {
    if (request.is_moved) {
      Result<Reply> reply = second_.apply(operation);
      if (reply) requests_.erase(operation.id.text());
      return reply;
    }
    if (request.on_first) require(first_.apply(about(Verb::abort, request)).has_value(), "");
    request.on_first = false;
    request.is_gone = true;
    if (request.copies.empty()) release(request);
    return Reply();
  }

  // --- Both -------------------------------------------------------------------------------------

  Result<Reply> on_both(const Operation& operation) {
    const Result<Reply> first = first_.apply(operation), second = second_.apply(operation);
    if (!first || !second) return first ? second : first;
    Reply both;
    for (const ReplyField field :
         {ReplyField::kv, ReplyField::state, ReplyField::kv_free, ReplyField::kv_locked,
          ReplyField::states_free, ReplyField::states_locked})
      if (first->has(field)) both.set(field, first->get(field) + second->get(field));
    return both;
  }

  Result<Reply> evict(const Operation& operation) {
    const std::string tier = operation.tier.exists() ? operation.tier.text() : "both";
    Operation untold = operation;
    untold.tier = Name();
    if (tier == "prefill") return first_.apply(untold);
    if (tier == "decode") return second_.apply(untold);
    if (tier != "both" || operation.room >= 0) return fail("one of two servers evicts");
    return on_both(untold);
  }

  const Count slices_, decode_kv_;
  SglangOracle first_, second_;
  std::map<std::string, Request> requests_;
  std::deque<Count> flying_;  // copies, the oldest first
  Count transfers_ = 0, copies_ = 0;
};

const Registration<OracleEntry> kSglangPd{
    {"sglang-pd", [](const SubjectOptions& options) -> std::unique_ptr<Subject> {
       return std::make_unique<SglangPdOracle>(options.config);
     }}};

}  // namespace
}  // namespace lockstep::reference
