// TensorRT-Edge-LLM's slot caches: the subject that follows their rules (edge_llm.md) literally. A
// batch of rows instead of a tree. The answers of edge-llm and edge-llm-v0 are the same.

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "reference/protocol/subject.hpp"

namespace lockstep::reference {
namespace {

constexpr std::int64_t kMostVerified = 16;

class EdgeLlmOracle final : public Subject {
 public:
  explicit EdgeLlmOracle(const Config& config) : config_(config) {}

  Result<Reply> apply(const Operation& operation) override {
    switch (operation.verb) {
      case Verb::admit: return admit(operation);
      case Verb::compact: return compact(operation);
      case Verb::step: return Reply{};
      case Verb::evict:
        if (operation.room != Operation::kAbsent) return fail("evict: there is no room= here");
        [[fallthrough]];
      case Verb::flush: return Reply().set(ReplyField::kv, 0).set(ReplyField::state, 0);
      case Verb::check: return check();
      default: break;
    }
    if (capability_of(operation.verb) == Capability::tree || operation.verb == Verb::complete)
      return fail("not a verb of a slot cache");
    const auto found = requests_.find(operation.id.text());
    if (found == requests_.end()) return fail("there is no such request");
    Request& request = found->second;
    const bool ends = operation.verb == Verb::finish || operation.verb == Verb::abort ||
                      operation.verb == Verb::preempt;
    const bool stores = operation.verb == Verb::finish && operation.insert;
    if (ends && (request.drafts.empty() || !stores)) {
      std::ranges::replace(rows_, found->first, std::string());
      requests_.erase(found);
      return stores ? nothing_stored() : Reply{};
    }
    if (operation.verb == Verb::accept) return accept(request, operation);
    if (!request.drafts.empty()) return fail("a verification was not accepted yet");
    switch (operation.verb) {
      case Verb::extend: return extend(request, operation);
      case Verb::capture: return capture(request, operation);
      case Verb::restore: return restore(request, operation);
      default: break;
    }
    if (operation.up_to > request.computed) return fail("checkpoint: not computed yet");
    return nothing_stored();
  }

 private:
  struct Request {
    std::string salt;
    std::vector<Token> known;
    std::int64_t computed = 0;
    std::vector<Token> drafts;  ///< of a verification that was not accepted yet
  };
  struct Captured {
    std::string salt;
    std::vector<Token> tokens;
  };

  static Reply nothing_stored() {
    return Reply().set(ReplyField::exist, 0).set(ReplyField::length, 0);
  }
  std::int64_t row_size() const { return config_.kv_tokens / config_.rows(); }

  Result<Reply> admit(const Operation& operation) {
    if (requests_.contains(operation.id.text())) return fail("there is such a request already");
    const std::vector<Token> tokens = operation.tokens.values();
    if (tokens.empty() || operation.prompt > std::ssize(tokens) || operation.external > 0 ||
        operation.room != Operation::kAbsent)
      return fail("admit: no tokens, a prompt longer than they are, or external ones");
    if (std::ssize(tokens) > row_size()) return Reply::refusal(Refusal::too_long);
    auto row = std::ranges::find(rows_, std::string());
    if (row == rows_.end()) {
      if (std::ssize(rows_) == config_.rows()) return Reply::refusal(Refusal::no_row);
      row = rows_.insert(row, std::string());
    }
    *row = operation.id.text();
    requests_[*row] = {operation.salt.text(), tokens, 0, {}};
    return resumed_at(0);
  }

  static Reply resumed_at(std::int64_t size) {
    return Reply()
        .set(ReplyField::cached, size)
        .set(ReplyField::state, size)
        .set(ReplyField::conv, size);
  }

  Result<Reply> extend(Request& request, const Operation& operation) {
    if (operation.async) return fail("extend: a slot cache does not run ahead of results");
    const std::vector<Token> more = operation.tokens.values();
    const std::vector<Token> drafts = operation.drafts.values();
    const std::int64_t left =
        std::ssize(request.known) + std::ssize(more) + std::ssize(drafts) - request.computed;
    if (operation.n < 1 || operation.n > left || (!drafts.empty() && operation.n != left))
      return fail("extend: n is not a number of tokens that are left");
    if (!drafts.empty() && operation.n == std::ssize(drafts))
      return fail("extend: there is no sampled token that the drafts would follow");
    if (!drafts.empty() && operation.n > kMostVerified) return Reply::refusal(Refusal::too_long);
    if (request.computed + operation.n > row_size()) return Reply::refusal(Refusal::no_kv);
    request.known.insert(request.known.end(), more.begin(), more.end());
    request.drafts = drafts;
    if (drafts.empty()) request.computed += operation.n;
    return Reply().set(ReplyField::n, operation.n);
  }

  static Result<Reply> accept(Request& request, const Operation& operation) {
    const std::vector<Token> tokens = operation.tokens.values();
    if (operation.n != std::ssize(tokens)) return fail("accept: n is not the number of tokens");
    const std::vector<Token>& drafts = request.drafts;
    if (!drafts.empty() && (tokens.empty() || tokens.size() > drafts.size() + 1 ||
                            !std::equal(tokens.begin(), tokens.end() - 1, drafts.begin())))
      return fail("accept: the tokens kept are drafts and one more");
    request.known.insert(request.known.end(), tokens.begin(), tokens.end());
    if (!drafts.empty()) request.computed = std::ssize(request.known) - 1;
    request.drafts.clear();
    return Reply().set(ReplyField::n, operation.n);
  }

  Result<Reply> capture(const Request& request, const Operation& operation) {
    if (request.computed == 0) return fail("capture: nothing is computed");
    const std::string& name = operation.as.text();
    if (!captured_.contains(name) && std::ssize(captured_) == config_.state_slots)
      return Reply::refusal(Refusal::no_state_slot);
    captured_[name] = {request.salt,
                       {request.known.begin(), request.known.begin() + request.computed}};
    return Reply().set(ReplyField::length, request.computed);
  }

  Result<Reply> restore(Request& request, const Operation& operation) {
    const auto found = captured_.find(operation.from.text());
    if (found == captured_.end()) return fail("restore: nothing was captured under that name");
    const auto& [salt, tokens] = found->second;
    if (request.computed > 0 || salt != request.salt || tokens.size() >= request.known.size() ||
        !std::equal(tokens.begin(), tokens.end(), request.known.begin()))
      return fail("restore: not the beginning of a request that has computed nothing");
    request.computed = std::ssize(tokens);
    return resumed_at(request.computed);
  }

  Result<Reply> compact(const Operation& operation) {
    const std::vector<std::int64_t>& mapping = operation.mapping;
    if (mapping.size() != rows_.size()) return fail("compact: not one number for each row");
    const auto kept =
        std::ranges::count_if(rows_, [](const std::string& row) { return !row.empty(); });
    std::vector<std::string> rows(static_cast<std::size_t>(kept));
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      if (rows_[i].empty() != (mapping[i] == -1)) return fail("compact: -1 is for holes");
      if (rows_[i].empty()) continue;
      if (mapping[i] < 0 || mapping[i] >= kept ||
          !rows[static_cast<std::size_t>(mapping[i])].empty())
        return fail("compact: rows become 0 to k - 1, each one once");
      if (!requests_.at(rows_[i]).drafts.empty()) return fail("compact: a row verifies drafts");
      rows[static_cast<std::size_t>(mapping[i])] = rows_[i];
    }
    rows_ = rows;
    return Reply{};
  }

  Reply check() const {
    std::int64_t used = 0;
    for (const auto& [id, request] : requests_) used += request.computed;
    const std::int64_t running = std::ssize(requests_);
    return Reply()
        .set(ReplyField::kv_free, row_size() * config_.rows() - used)
        .set(ReplyField::kv_locked, used)
        .set(ReplyField::states_free, config_.rows() - running)
        .set(ReplyField::states_locked, running);
  }

  const Config config_;
  std::vector<std::string> rows_;  ///< the request of each; empty: a hole
  std::map<std::string, Request> requests_;
  std::map<std::string, Captured> captured_;
};

std::unique_ptr<Subject> make_edge_llm(const SubjectOptions& options) {
  return std::make_unique<EdgeLlmOracle>(options.config);
}

const Registration<OracleEntry> kEdgeLlm{{"edge-llm", make_edge_llm},
                                         {"edge-llm-v0", make_edge_llm}};

}  // namespace
}  // namespace lockstep::reference
