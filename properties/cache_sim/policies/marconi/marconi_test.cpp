// Marconi beyond the comparison with its oracle: the paper's figures, and that tuning chooses the
// alpha that saves most.
#include <gtest/gtest.h>

#include "cache_sim/policies/marconi/marconi_policy.hpp"
#include "cache_sim/search/swarm.hpp"

namespace lockstep::cache_sim {
namespace {

// Section 2 of the paper: a state of the 7B model is worth hundreds of tokens of KV.
TEST(MarconiSizes, areThePapersWhereNothingIsSaid) {
  const MarconiSizes sizes = MarconiSizes::of(Config());
  EXPECT_EQ(sizes.token_bytes, 65'536);
  EXPECT_EQ(sizes.state_bytes, 24 * 1'116'160);
  EXPECT_EQ(sizes.capacity, 131'072 * sizes.token_bytes + 256 * sizes.state_bytes);
}

/// Requests over few documents, of awkward lengths.
Tokens some_prompt(Draw& draw) {
  return Tokens::of_document(1 + static_cast<Document>(draw.below(3)), 0,
                             static_cast<std::uint32_t>(draw.between(1, 12)))
      .followed_by(Tokens::of_document(10 + static_cast<Document>(draw.below(4)), 0,
                                       static_cast<std::uint32_t>(draw.between(1, 20))));
}

// Two tuners see the same requests. One is asked what each alpha would save, the other one decides.
TEST(MarconiTuner, choosesTheLeastAlphaThatSavesMost) {
  constexpr std::int64_t kCapacity = 120;
  constexpr int kRequests = 24;
  int above_zero = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    Draw draw(seed, 1);
    MarconiCosts costs{.token_bytes = 1, .state_bytes = draw.between(1, 20)};
    costs.flops = {static_cast<double>(draw.between(1, 50)),
                   static_cast<double>(draw.between(0, 5))};
    MarconiTree start(costs, nullptr);
    for (int i = 0; i < 3; ++i) {
      const Tokens tokens = some_prompt(draw);
      start.insert(tokens, tokens.size(), Name(), nullptr, StateSlot::none());
    }
    Config config;
    config.put("bootstrap", kRequests);
    MarconiTuner decides(MarconiOptions::of(config), kCapacity, {});
    config.put("bootstrap", kRequests + 1);
    MarconiTuner is_asked(MarconiOptions::of(config), kCapacity, {});
    decides.evicted(start);
    is_asked.evicted(start);
    for (int i = 0; i < kRequests; ++i) {
      EXPECT_EQ(decides.alpha(), 0);
      const Tokens prompt = some_prompt(draw);
      const Tokens stored = prompt.followed_by(Tokens::of_document(90, 0, 3));
      decides.finished(start, prompt, stored, Name());
      is_asked.finished(start, prompt, stored, Name());
    }
    double most = -1;
    double best = 0;
    for (int tenths = 0; tenths <= 20; ++tenths) {
      const double saved = is_asked.saved_with(tenths * 100 / 1000.0, start);
      if (saved <= most) continue;
      most = saved;
      best = tenths * 100 / 1000.0;
    }
    EXPECT_EQ(decides.alpha(), best) << "seed " << seed;
    above_zero += best > 0 ? 1 : 0;
  }
  EXPECT_GT(above_zero, 5);
}

}  // namespace
}  // namespace lockstep::cache_sim
