// SPDX-License-Identifier: Apache-2.0
//
// All device memory for sessions: one allocation at start, cut into slabs of 2 MiB (one huge page), each slab serving
// blocks of one size while it has any. Blocks are reserved first, all or nothing, and taken later without failing.
//
//   Arena ── owns ── slabs ── cut into ── blocks
//     ▲                                     ▲ taken by
//     └── Reservation (accounted blocks) ── Block (returned to its reservation's account when destroyed)
//
// Memory is passed on as it is between blocks of one owner. A block whose bytes another owner may have written is
// zeroed when it is taken, on the stream of who takes it: in pieces as they are needed, and only where owners change.
//
// free_bytes() is what a reservation of a new block size could get: slabs that serve no size. Slabs return to that
// pool when the last reserved block that needs them is gone.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace ctkvr {

class Arena;

// Whose bytes memory holds: sessions of one tenant have one.
using OwnerId = uint32_t;

// One block of device memory, aligned to 64 bytes, owned; its bytes are zero, or as an earlier block of the same owner
// left them, or as the backend gave them. Must not outlive the Reservation it was taken from.
class Block {
 public:
  Block() = default;
  Block(Block&& other) noexcept { *this = std::move(other); }
  Block& operator=(Block&& other) noexcept;
  ~Block();
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  friend class Arena;
  friend class Reservation;
  Arena* arena_ = nullptr;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  OwnerId owner_ = 0;
};

// So many blocks of a size, promised. Move-only; gives the promise back when destroyed. Not thread-safe.
class Reservation {
 public:
  Reservation() = default;
  Reservation(Reservation&& other) noexcept { *this = std::move(other); }
  Reservation& operator=(Reservation&& other) noexcept;
  ~Reservation();

  // A block; zeroes it first where another owner may have written, in the order of the reservation's stream.
  // REQUIRES: fewer than `count` blocks of this reservation are alive.
  Block Take();
  size_t block_bytes() const { return block_bytes_; }
  uint64_t count() const { return count_; }
  uint64_t bytes() const { return count_ * block_bytes_; }

 private:
  friend class Arena;
  Arena* arena_ = nullptr;
  size_t block_bytes_ = 0;
  uint64_t count_ = 0;
  OwnerId owner_ = 0;
  Stream* stream_ = nullptr;
};

// Thread-safe: its mutex guards counters and free lists only, never a device call.
class Arena {
 public:
  static constexpr size_t kSlabBytes = size_t{2} << 20;
  static constexpr size_t kBlockAlignment = 64;

  struct Request {
    size_t block_bytes = 0;  // rounded up to kBlockAlignment; at most kSlabBytes
    uint64_t count = 0;
  };

  // `bytes` is rounded down to whole slabs. RESOURCE_EXHAUSTED when the backend cannot allocate it; INVALID_ARGUMENT
  // below one slab.
  static absl::StatusOr<std::unique_ptr<Arena>> Create(Backend& backend, size_t bytes);
  ~Arena();  // CHECK: nothing is reserved

  // Who reserves. `stream`, of the arena's backend, carries the work on the blocks and outlives the reservations; null
  // only where no other owner ever reserves.
  struct Holder {
    OwnerId owner = 0;
    Stream* stream = nullptr;
  };
  // One reservation for each request, all or none. RESOURCE_EXHAUSTED with bytes needed and free.
  absl::StatusOr<std::vector<Reservation>> Reserve(std::span<const Request> requests, const Holder& holder);
  absl::StatusOr<std::vector<Reservation>> Reserve(std::span<const Request> requests) { return Reserve(requests, {}); }

  size_t capacity_bytes() const { return slab_count_ * kSlabBytes; }
  size_t free_bytes() const;
  size_t reserved_bytes() const;                                                             // blocks promised
  size_t held_bytes() const;                                                                 // blocks alive
  uint64_t cleared_bytes() const { return cleared_bytes_.load(std::memory_order_relaxed); }  // only grows

 private:
  friend class Block;
  friend class Reservation;
  struct SizeClass;

  Arena(Backend& backend, DeviceBuffer memory, size_t slab_count);
  std::byte* TakeBlock(const Reservation& reservation);
  std::byte* FindBlock(const Reservation& reservation, bool* clear);
  void ReturnBlock(const Block& block);
  void Release(size_t block_bytes, uint64_t count);
  void GrowLocked(size_t block_bytes, uint64_t count);
  void ShrinkLocked(SizeClass& size_class, size_t block_bytes);

  Backend& backend_;
  const DeviceBuffer memory_;
  const size_t slab_count_;
  mutable std::mutex mutex_;
  std::vector<uint32_t> free_slabs_;
  std::vector<uint64_t> slab_writers_;  // [slab_count], of free slabs: who may have written there
  std::map<size_t, SizeClass> classes_;
  size_t reserved_bytes_ = 0;
  size_t held_bytes_ = 0;
  std::atomic<uint64_t> cleared_bytes_{0};
};

}  // namespace ctkvr
