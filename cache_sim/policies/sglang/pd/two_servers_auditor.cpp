// The auditor of two servers: that of a radix tree for each of them, after each operation that it
// has answered, and laws L1, L3 and L8 of reference/caches/disaggregation.md for what moves. That
// nothing is read before its copy has landed, and that sources and targets stay as they are while
// one is in flight, is seen by the labels.
#include <fmt/format.h>

#include <set>
#include <utility>

#include "cache_sim/policies/sglang/audit/radix_auditor.hpp"
#include "cache_sim/policies/sglang/pd/two_servers.hpp"
#include "reference/base/counted.hpp"

namespace lockstep::cache_sim {
namespace {

class TwoServersAuditor final : public Auditor {
 public:
  TwoServersAuditor(TwoServers& servers, const LabelState* labels)
      : servers_(servers),
        labels_(labels),
        prefill_(servers.prefill(), labels),
        decode_(servers.decode(), labels) {
    servers_.watch([this](bool of_decode, const Operation& operation, const Reply& reply) {
      (of_decode ? decode_ : prefill_).after(operation, reply, noticed_);
    });
  }

  void after(const Operation& operation, const Reply&, Findings& findings) override {
    for (Finding& finding : std::exchange(noticed_, {})) findings.push_back(std::move(finding));
    std::set<std::uint32_t> decoding;
    for (const auto& [name, request] : servers_.moving()) {
      check_ends(request, findings);
      if (request.stage == MovingRequest::Stage::decodes) {
        decoding.insert(name);
        if (!decoding_.contains(name)) check_arrival(request, findings);
      } else if (operation.verb == Verb::settle) {
        check_is_awaited(request, findings);
      }
    }
    decoding_ = std::move(decoding);
  }

  void recompute(Findings& findings) override {
    prefill_.recompute(findings);
    decode_.recompute(findings);
  }

 private:
  using Stage = MovingRequest::Stage;

  /// L3: while copies are in flight both ends have an owner, unless nobody needs the copies.
  void check_ends(const MovingRequest& request, Findings& findings) {
    if (request.copies.empty()) return;
    const auto lacks = [&](const char* server) {
      findings.push_back({FindingKind::source_changed,
                          fmt::format("{} of request `{}` {} in flight, and the {} server does not "
                                      "have the request any more",
                                      counted(request.copies.size(), "copy", "copies"),
                                      request.id.text(), is_or_are(request.copies.size()), server),
                          "it waits for them", "it has ended"});
    };
    if (!request.copies.back().is_abandoned && servers_.prefill().request(request.id) == nullptr)
      lacks("prefill");
    if (servers_.decode().request(request.id) == nullptr) lacks("decode");
  }

  /// L1: all that the decode server has of a request that has moved stands for its own tokens.
  void check_arrival(const MovingRequest& request, Findings& findings) {
    const RadixRequest* const now = servers_.decode().request(request.id);
    if (labels_ == nullptr || now == nullptr) return;
    const auto wrong = [&](std::string what, const std::string& due, const std::string& is) {
      findings.push_back({FindingKind::wrong_state_prefix,
                          fmt::format("{} that request `{}` has moved with stands for {}", what,
                                      request.id.text(), is),
                          due, is});
    };
    const Label due = label_of(now->known, now->computed);
    for (const StatePart part : kStateParts)
      if (const Label& label = labels_->label(now->live, part); label != due)
        return wrong(fmt::format("the {} state", to_string(part)), due.text(), label.text());
    std::vector<std::uint64_t> fingerprints(now->computed);
    now->known.prefix_fingerprints(0, now->computed, fingerprints);
    for_slots(now->kv, 0, now->computed, [&](KvSlots slots, std::uint32_t place) {
      for (std::size_t i = 0; i < slots.size(); ++i)
        if (labels_->kv_fingerprint(slots[i]) != fingerprints[place + i] && findings.empty())
          wrong(fmt::format("the KV of token {} in slot {}", place + i, slots[i]), "its own prefix",
                "another prefix");
    });
  }

  /// L8: what nobody waits for has ended.
  void check_is_awaited(const MovingRequest& request, Findings& findings) {
    if (!request.has_target || request.stage == Stage::prefills || !request.copies.empty()) return;
    findings.push_back(
        {FindingKind::stuck,
         fmt::format("request `{}` waits, and no copy of it is in flight", request.id.text()),
         "a settle ends its transfer", "it goes on"});
  }

  TwoServers& servers_;
  const LabelState* labels_;
  RadixAuditor prefill_, decode_;
  Findings noticed_;
  std::set<std::uint32_t> decoding_;  // names of the requests that have moved
};

const Registration<AuditorEntry> kTwoServersAuditor{
    {.name = "two-servers",
     .make = [](Subject& subject, const LabelState* labels) -> std::unique_ptr<Auditor> {
       auto* const servers = dynamic_cast<TwoServers*>(&subject);
       return servers == nullptr ? nullptr : std::make_unique<TwoServersAuditor>(*servers, labels);
     }}};

}  // namespace
}  // namespace lockstep::cache_sim
