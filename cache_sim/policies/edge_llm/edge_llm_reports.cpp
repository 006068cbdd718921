// The project whose bug reports traces of this family cite.
#include "cache_sim/trace/public_reports.hpp"

namespace lockstep::cache_sim {
namespace {

const Registration<PublicProject> kTensorRtLlm{{"tensorrt-llm", "NVIDIA/TensorRT-LLM"}};
const Registration<PublicProject> kTrtEdge{{"trt-edge", "NVIDIA/TensorRT-Edge-LLM"}};

}  // namespace
}  // namespace lockstep::cache_sim
