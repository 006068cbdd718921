// The operations that `lockstep judge` can judge. They register themselves, so that the program
// finds those that are linked by name, and refuses the others by name.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "reference/base/registry.hpp"
#include "reference/base/result.hpp"

namespace lockstep {

struct JudgeRequest {
  std::string operation;
  std::string candidate;        ///< MODULE:FUNCTION, FILE.py:FUNCTION or LIB.so:SYMBOL
  std::string device = "auto";  ///< auto, cpu or cuda
  std::string types;       ///< types of activations and states, "bfloat16/float32"; empty: defaults
  std::string only;        ///< only cases whose name contains this
  std::int64_t batch = 0;  ///< rows of the timed cases; 0: the device's default
  std::uint64_t seed = 1;
  std::int64_t timeout_s = 300;  ///< seconds for all cases of a candidate together
  bool timed = true;
  bool batch_invariant = false;  ///< rows are also run in other batches, and their bits compared
  /// Is told what is being done, the cases by their names, in the process that judges.
  std::function<void(std::string how_far)> progress{};
};

/// The printed text, the JSON to be written, and the exit status of the program.
struct JudgeReport {
  std::string text;
  std::string json;
  ExitStatus status = kExitPass;
};

struct JudgedOperation {
  std::string_view name;
  std::string_view summary;
  Result<JudgeReport> (*judge)(const JudgeRequest& request);
};

}  // namespace lockstep
