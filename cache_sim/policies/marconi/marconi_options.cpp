#include "cache_sim/policies/marconi/marconi_options.hpp"

#include <limits>

#include "reference/base/registry.hpp"

namespace lockstep::cache_sim {

MarconiOptions MarconiOptions::of(const Config& config) {
  return {.token_bytes = config.number("token_bytes"),
          .state_bytes = config.number("state_bytes"),
          .alpha = config.text("alpha"),
          .bootstrap = config.number("bootstrap"),
          .flops_token = config.number("flops_token"),
          .flops_pair = config.number("flops_pair")};
}

namespace {

constexpr ConfigOption::Range kCount{0, std::numeric_limits<std::int64_t>::max()};
const Registration<ConfigOption> kOptions{
    {.name = "token_bytes", .otherwise = "0", .number = kCount},
    {.name = "state_bytes", .otherwise = "0", .number = kCount},
    {.name = "alpha", .otherwise = "tuned"},
    {.name = "bootstrap", .otherwise = "5", .number = {{0, 1 << 20}}, .overruled_by = {"alpha"}},
    {.name = "flops_token", .otherwise = "0", .number = kCount},
    {.name = "flops_pair", .otherwise = "0", .number = kCount}};

}  // namespace
}  // namespace lockstep::cache_sim
