// Defects of the vLLM policies: one rule broken each, at the place of the rule. Those marked (0.33)
// are what vLLM 0.33 itself does; reports/found/ describes them.
#pragma once

#include "reference/protocol/defect.hpp"

namespace lockstep::cache_sim {

inline const Defect kUsesStatesOfThisStep{
    "vllm-align:uses-states-of-this-step",
    "a request resumes from a state that another request's forward of this very step will write"};
inline const Defect kCopiesUnwrittenKv{
    "vllm-align:copies-unwritten-kv",
    "a hit inside an attention block copies it before this step's forward has written it (0.33)"};

}  // namespace lockstep::cache_sim
