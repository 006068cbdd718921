#include "cache_sim/server/vllm/encoder_cache.hpp"

#include <numeric>

#include "reference/base/mark.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

bool EncoderCache::take(RequestNumber request, Input input, const Image& image) {
  const auto entry = entries_.find(image.digest);
  if (entry == entries_.end()) return false;
  if (entry->second.users.empty()) std::erase(unused_, image.digest);
  entry->second.users.emplace(request, input);
  needed_[request].emplace(input, image.digest);
  return true;
}

bool EncoderCache::make_room(const Image& image, std::int64_t planned) {
  const std::int64_t needed = image.size + planned;
  const std::int64_t unused = std::accumulate(
      unused_.begin(), unused_.end(), std::int64_t{0},
      [&](std::int64_t sum, std::uint64_t digest) { return sum + entries_.at(digest).size; });
  if (needed > free_ + unused) return false;
  while (needed > free_) {
    LOCKSTEP_MARK("encoder_cache.evicts");
    free_ += entries_.at(unused_.front()).size;
    entries_.erase(unused_.front());
    unused_.pop_front();
  }
  return true;
}

void EncoderCache::put(RequestNumber request, Input input, const Image& image) {
  require(image.size <= free_, "room was made for an image before it is put");
  free_ -= image.size;
  entries_.emplace(image.digest, Entry{image.size, {{request, input}}});
  needed_[request].emplace(input, image.digest);
}

void EncoderCache::release(RequestNumber request, Input input) {
  const auto needed = needed_.find(request);
  if (needed == needed_.end() || !needed->second.contains(input)) return;
  const std::uint64_t digest = needed->second.at(input);
  needed->second.erase(input);
  if (needed->second.empty()) needed_.erase(needed);
  Entry& entry = entries_.at(digest);
  entry.users.erase({request, input});
  if (entry.users.empty()) unused_.push_back(digest);
}

void EncoderCache::release_all(RequestNumber request) {
  const std::map<Input, std::uint64_t> needed = of(request);
  for (const auto& [input, digest] : needed) release(request, input);
}

const std::map<EncoderCache::Input, std::uint64_t>& EncoderCache::of(RequestNumber request) const {
  static const std::map<Input, std::uint64_t> kNone;
  const auto needed = needed_.find(request);
  return needed == needed_.end() ? kNone : needed->second;
}

}  // namespace lockstep::cache_sim
