// A note of the kernel that a call launched. An operation has several kernels and chooses by the
// shape of the batch; a test reads the note to know which kernel it has compared.
#pragma once

#include <string>

namespace lockstep::kernels {

struct LaunchNote {
  const char* kernel = "";  ///< "step", "rows" and so on: names from the operation's file
  int per_thread = 0;       ///< rows of a state that a lane holds, or channels of a thread
  int warps = 0;            ///< per block
  bool cached = false;      ///< states are accessed with Cached::yes

  std::string text() const {
    return std::string(kernel) + " " + std::to_string(per_thread) + "x" + std::to_string(warps) +
           (cached ? " cached" : "");
  }
};

/// The note of the calling thread's last launch.
inline thread_local LaunchNote last_launch;

}  // namespace lockstep::kernels
