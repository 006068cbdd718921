// Invariants of a slot cache, checked after every operation: the length that forwards read is the
// number of tokens that the request has computed; the KV and states of every layer, and of the
// captured prefixes, stand for exactly these tokens.
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "cache_sim/model/label_state.hpp"
#include "cache_sim/policies/edge_llm/edge_llm_policy.hpp"
#include "reference/base/counted.hpp"

namespace lockstep::cache_sim {
namespace {

class EdgeLlmAuditor final : public Auditor {
 public:
  EdgeLlmAuditor(const EdgeLlmPolicy& policy, const LabelState* labels)
      : policy_(policy), labels_(labels) {}

  void after(const Operation& /*operation*/, const Reply& /*reply*/, Findings& findings) override {
    recompute(findings);
  }

  void recompute(Findings& findings) override {
    findings_ = &findings;
    const EdgeLlmLayout& layout = policy_.layout();
    std::vector<bool> taken(layout.rows);
    std::size_t running = 0;
    for (std::size_t i = 0; i < policy_.rows().size(); ++i) {
      if (!policy_.rows()[i].exists()) continue;
      ++running;
      check_row(static_cast<std::uint32_t>(i), taken);
    }
    if (running != policy_.requests().size())
      report(FindingKind::size_accounting, "not every request has one row",
             std::to_string(policy_.requests().size()), std::to_string(running));
    for (std::uint32_t place = 0; place < policy_.captured().size(); ++place) {
      const CapturedPrefix& captured = policy_.captured()[place];
      const std::string name = fmt::format("the captured prefix `{}`", captured.name.text());
      check_kv(layout.captured_row(place), captured.tokens, name);
      for (std::uint32_t layer = 0; layer < layout.recurrent_layers; ++layer)
        check_state(layout.captured_state(layer, place), captured.tokens, layer, name);
    }
  }

 private:
  void report(FindingKind kind, std::string text, std::string expected, std::string actual) {
    findings_->push_back({kind, std::move(text), std::move(expected), std::move(actual)});
  }

  void check_row(std::uint32_t number, std::vector<bool>& taken) {
    const Name id = policy_.rows()[number];
    const std::uint32_t slot = policy_.slots()[number];
    const std::string name = fmt::format("row {} (request `{}`)", number, id.text());
    if (slot >= taken.size() || taken[slot])
      return report(FindingKind::slot_in_two_places,
                    fmt::format("{} has slot {}, which is not its own", name, slot),
                    "a slot of its own", std::to_string(slot));
    taken[slot] = true;
    const auto found = std::ranges::find(policy_.requests(), id, &RowRequest::id);
    if (found == policy_.requests().end())
      return report(FindingKind::size_accounting, fmt::format("{} is nobody's", name), "a request",
                    "none");
    const std::uint32_t length = policy_.lengths()[number];
    if (length != found->computed)
      report(FindingKind::kv_state_disagree,
             fmt::format("{} has computed {}, and its length says {}", name,
                         counted(found->computed, "token"), length),
             std::to_string(found->computed), std::to_string(length));
    const Tokens tokens = found->known.prefix(found->computed);
    check_kv(slot, tokens, name);
    for (std::uint32_t layer = 0; layer < policy_.layout().recurrent_layers; ++layer)
      check_state(policy_.layout().state(layer, slot), tokens, layer, name);
  }

  void check_state(StateSlot slot, const Tokens& tokens, std::uint32_t layer,
                   const std::string& owner) {
    if (labels_ == nullptr) return;
    const Label expected = label_of(tokens, tokens.size());
    for (const StatePart part : kStateParts)
      if (labels_->label(slot, part) != expected)
        return report(FindingKind::wrong_state_prefix,
                      fmt::format("the {} state of {} in recurrent layer {} stands for {}",
                                  to_string(part), owner, layer, labels_->label(slot, part).text()),
                      expected.text(), labels_->label(slot, part).text());
  }

  void check_kv(std::uint32_t row, const Tokens& tokens, const std::string& owner) {
    if (labels_ == nullptr || tokens.empty()) return;
    fingerprints_.resize(tokens.size());
    tokens.prefix_fingerprints(0, tokens.size(), fingerprints_);
    for (std::uint32_t layer = 0; layer < policy_.layout().attention_layers; ++layer)
      for (std::uint32_t i = 0; i < tokens.size(); ++i)
        if (labels_->kv_fingerprint(policy_.layout().kv_row(layer, row) + i) != fingerprints_[i])
          return report(FindingKind::wrong_state_prefix,
                        fmt::format("the KV of token {} of {} in attention layer {} is not its own",
                                    i, owner, layer),
                        tokens.prefix(i + 1).text(40), "that of another prefix");
  }

  const EdgeLlmPolicy& policy_;
  const LabelState* labels_;
  Findings* findings_ = nullptr;
  std::vector<std::uint64_t> fingerprints_;
};

const Registration<AuditorEntry> kEdgeLlmAuditor{
    {"edge-llm", [](Subject& subject, const LabelState* labels) -> std::unique_ptr<Auditor> {
       const auto* const policy = dynamic_cast<const EdgeLlmPolicy*>(&subject);
       if (policy == nullptr) return nullptr;
       return std::make_unique<EdgeLlmAuditor>(*policy, labels);
     }}};

}  // namespace
}  // namespace lockstep::cache_sim
