// The project whose bug reports traces of this family cite.
#include "cache_sim/trace/public_reports.hpp"

namespace lockstep::cache_sim {
namespace {

const Registration<PublicProject> kVllm{{"vllm", "vllm-project/vllm"}};

}  // namespace
}  // namespace lockstep::cache_sim
