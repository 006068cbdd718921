// Which kernel a call launched: an operation has several, chosen by the shape of a batch, and a
// test that does not know which one ran does not know what it has compared.
#pragma once

#include <string>

namespace lockstep::kernels {

struct LaunchNote {
  const char* kernel = "";  ///< "step", "rows" and so on: the operation's file says which there are
  int per_thread = 0;       ///< rows of a state that a lane holds, or channels of a thread
  int warps = 0;            ///< of a block
  bool cached = false;      ///< states stay in L2

  std::string text() const {
    return std::string(kernel) + " " + std::to_string(per_thread) + "x" + std::to_string(warps) +
           (cached ? " cached" : "");
  }
};

/// Of the calling thread's last launch.
inline thread_local LaunchNote last_launch;

}  // namespace lockstep::kernels
