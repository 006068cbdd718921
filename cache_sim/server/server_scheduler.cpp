#include "cache_sim/server/server_scheduler.hpp"

#include "cache_sim/server/scheduler.hpp"
#include "cache_sim/server/vllm_scheduler.hpp"

namespace lockstep::cache_sim {

std::unique_ptr<ServerScheduler> make_scheduler(const SchedulerOptions& options) {
  if (options.vllm) return std::make_unique<VllmScheduler>(options);
  return std::make_unique<Scheduler>(options);
}

}  // namespace lockstep::cache_sim
