// The cache of encoded images of vLLM 0.33 (vllm/v1/core/encoder_cache_manager.py). Requests that
// send the same image share its entry, which takes as many places as the image has tokens. An entry
// that no request needs stays until its places are needed; the oldest such entry goes first.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <utility>

#include "reference/protocol/schedule.hpp"

namespace lockstep::cache_sim {

class EncoderCache {
 public:
  /// An image, identified by the digest of its tokens or of its name.
  struct Image {
    std::uint64_t digest;
    std::int64_t size;
  };
  using Input = std::uint32_t;  ///< the index of an image within its request

  explicit EncoderCache(std::int64_t places) : free_(places) {}

  /// Marks the image as needed by the request; false where it is not cached.
  bool take(RequestNumber request, Input input, const Image& image);
  /// Evicts unneeded entries until the image and `planned` more places fit; false where they
  /// cannot.
  bool make_room(const Image& image, std::int64_t planned);
  /// Adds an image that will be encoded; there must be room for it.
  void put(RequestNumber request, Input input, const Image& image);
  void release(RequestNumber request, Input input);
  void release_all(RequestNumber request);
  /// The images that the request needs, ascending by index.
  const std::map<Input, std::uint64_t>& of(RequestNumber request) const;

 private:
  struct Entry {
    std::int64_t size;
    std::set<std::pair<RequestNumber, Input>> users;
  };
  std::map<std::uint64_t, Entry> entries_;  // by digest
  std::map<RequestNumber, std::map<Input, std::uint64_t>> needed_;
  std::deque<std::uint64_t> unused_;  // entries that no request needs, the oldest first
  std::int64_t free_;
};

}  // namespace lockstep::cache_sim
