// The defects of two servers: each sets one rule of moving requests to a wrong value.
#include "cache_sim/policies/sglang/pd/two_servers.hpp"
#include "reference/protocol/defect.hpp"

namespace lockstep::cache_sim {
namespace {

using Rules = PdRules;

constexpr std::string_view kSlices = "slices=2";

const BrokenRule<Rules> kBroken[] = {
    {"sglang-pd:source-leaves-early",
     "the prefill server ends a request when it has sent it, while copies still read its slots",
     &Rules::source_waits, false},
    {"sglang-pd:decodes-before-landing",
     "the decode server goes on with a request before all of its copies have landed",
     &Rules::decode_waits, false},
    {"sglang-pd:stores-after-sending",
     "a chunk is sent before it is stored, and storing it frees the slots of what was stored "
     "meanwhile under the copy",
     &Rules::stores_before_sending, false},
    {"sglang-pd:reuses-aborted-targets",
     "slots of an aborted request are free while its copies still write them (SGLang 0.5.23 where "
     "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE is 0, and otherwise after 30 seconds)",
     &Rules::aborted_targets_wait, false},
    {"sglang-pd:goes-on-after-failure", "a slice that has failed counts as one that has landed",
     &Rules::failure_ends_request, false},
    {"sglang-pd:applies-last-token-twice",
     "the prefill server computes the last token as well, and the decode server computes it again",
     &Rules::keeps_last_token, false},
    {"sglang-pd:leaves-state-behind", "the KV is sent and the state is not (SGLang #23773)",
     &Rules::sends_state, false},
    {"sglang-pd:state-slices-of-two-positions",
     "a rank's slice of the state, with its channels of each conv segment, is sent with the first "
     "tokens, those of the others with the last",
     &Rules::state_leaves_last, false, kSlices},
    {"sglang-pd:cuts-conv-as-one",
     "the conv state is cut into slices as if it were one segment, and not x, B and C (SGLang "
     "#22060)",
     &Rules::conv_in_segments, false, kSlices},
    {"sglang-pd:pairs-halves-of-kv-tensors",
     "each server takes the second half of its list of KV tensors for the values, so a draft model "
     "on the decode server alone shifts them (SGLang #17212)",
     &Rules::pairs_layers, false, "draft_model=decode"},
};

}  // namespace
}  // namespace lockstep::cache_sim
