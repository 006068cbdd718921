// Invariants of an exported model's rows, checked after every operation: the length that calls read
// is the number of tokens that the request has computed; the row's KV, and the KV that the last
// call attended to, stand for exactly these tokens.
#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <vector>

#include "cache_sim/model/label_state.hpp"
#include "cache_sim/policies/static_kv/static_kv_policy.hpp"
#include "reference/base/counted.hpp"

namespace lockstep::cache_sim {
namespace {

class StaticKvAuditor final : public Auditor {
 public:
  StaticKvAuditor(const StaticKvPolicy& policy, const LabelState* labels)
      : policy_(policy), labels_(labels) {}

  void after(const Operation& operation, const Reply& reply, Findings& findings) override {
    findings_ = &findings;
    if (operation.verb == Verb::extend && reply.refused == Refusal::none)
      check_kv(policy_.areas().copy(), policy_.attended().tokens,
               fmt::format("what request `{}` attended to", policy_.attended().request.text()));
    recompute(findings);
  }

  void recompute(Findings& findings) override {
    findings_ = &findings;
    std::set<std::string> seen;
    for (std::uint32_t row = 0; row < policy_.rows().size(); ++row) {
      const Name id = policy_.rows()[row];
      if (!id.exists()) continue;
      if (!seen.insert(std::string(id.text())).second)
        report(FindingKind::slot_in_two_places, fmt::format("request `{}` has two rows", id.text()),
               "one", "two");
      check_row(row, id);
    }
    if (seen.size() != policy_.requests().size())
      report(FindingKind::size_accounting, "not every request has one row",
             std::to_string(policy_.requests().size()), std::to_string(seen.size()));
    for (std::uint32_t place = 0; place < policy_.captured().size(); ++place)
      check_kv(policy_.areas().captured(place), policy_.captured()[place].tokens,
               fmt::format("the captured prefix `{}`", policy_.captured()[place].name.text()));
  }

 private:
  void report(FindingKind kind, std::string text, std::string expected, std::string actual) {
    findings_->push_back({kind, std::move(text), std::move(expected), std::move(actual)});
  }

  void check_row(std::uint32_t row, Name id) {
    const std::string name = fmt::format("row {} (request `{}`)", row, id.text());
    const auto found = std::ranges::find(policy_.requests(), id, &RowRequest::id);
    if (found == policy_.requests().end())
      return report(FindingKind::size_accounting, fmt::format("{} is nobody's", name), "a request",
                    "none");
    // A verification is cached as a whole until its accept.
    const Tokens all = found->known.followed_by(found->drafts);
    const Tokens tokens = all.prefix(found->drafts.empty() ? found->computed : all.size());
    if (policy_.lengths()[row] != tokens.size())
      report(FindingKind::kv_state_disagree,
             fmt::format("{} has {}, and its length says {}", name, counted(tokens.size(), "token"),
                         policy_.lengths()[row]),
             std::to_string(tokens.size()), std::to_string(policy_.lengths()[row]));
    check_kv(policy_.area_of(row), tokens, name);
  }

  void check_kv(std::uint32_t area, const Tokens& tokens, const std::string& owner) {
    if (labels_ == nullptr || tokens.empty()) return;
    fingerprints_.resize(tokens.size());
    tokens.prefix_fingerprints(0, tokens.size(), fingerprints_);
    for (std::uint32_t i = 0; i < tokens.size(); ++i)
      if (labels_->kv_fingerprint(policy_.areas().first_slot(area) + i) != fingerprints_[i])
        return report(FindingKind::wrong_state_prefix,
                      fmt::format("the KV of token {} of {} is not its own", i, owner),
                      tokens.prefix(i + 1).text(40), "that of another prefix");
  }

  const StaticKvPolicy& policy_;
  const LabelState* labels_;
  Findings* findings_ = nullptr;
  std::vector<std::uint64_t> fingerprints_;
};

const Registration<AuditorEntry> kStaticKvAuditor{
    {"static-kv", [](Subject& subject, const LabelState* labels) -> std::unique_ptr<Auditor> {
       const auto* const policy = dynamic_cast<const StaticKvPolicy*>(&subject);
       if (policy == nullptr) return nullptr;
       return std::make_unique<StaticKvAuditor>(*policy, labels);
     }}};

}  // namespace
}  // namespace lockstep::cache_sim
