// SPDX-License-Identifier: Apache-2.0

#include "kernels/arena.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/math.h"
#include "kernels/base/status_macros.h"

namespace ctkvr {

namespace {

// Who may have written to memory: an owner, nobody (the memory is as the backend gave it), or several.
constexpr uint64_t kNobody = UINT64_MAX;
constexpr uint64_t kSeveral = UINT64_MAX - 1;

uint64_t Either(uint64_t a, uint64_t b) {
  if (a == b || b == kNobody) return a;
  return a == kNobody ? b : kSeveral;
}

}  // namespace

// The slabs that serve one block size. Invariant: held <= reserved <= slabs.size() * blocks_per_slab, so a promised
// block is always there to take.
struct Arena::SizeClass {
  struct Slab {
    uint32_t fresh = 0;  // blocks never taken since the slab came: [fresh, blocks_per_slab)
    uint32_t held = 0;
    uint64_t fresh_writer = kNobody;  // of what was not taken since the slab came
    struct Returned {
      uint32_t block;
      OwnerId writer;
    };
    std::vector<Returned> returned;  // blocks taken and returned

    // Of the whole slab. REQUIRES: no block is held.
    uint64_t Writer(size_t block_bytes) const {
      const bool all_taken = fresh * block_bytes == kSlabBytes;
      uint64_t writer = all_taken ? kNobody : fresh_writer;
      for (const Returned& block : returned) writer = Either(writer, block.writer);
      return writer;
    }
  };

  uint64_t blocks_per_slab = 0;
  uint64_t reserved = 0;
  uint64_t held = 0;
  std::map<uint32_t, Slab> slabs;
  // Slabs with a block to give. The lowest is used first, so that high ones run empty and can go back.
  std::set<uint32_t> open;

  uint64_t SlabsFor(uint64_t blocks) const { return CeilDiv(blocks, blocks_per_slab); }
  bool HasSpareSlab() const { return slabs.size() > SlabsFor(reserved); }
};

Block& Block::operator=(Block&& other) noexcept {
  if (this == &other) return *this;
  if (data_ != nullptr) arena_->ReturnBlock(*this);
  arena_ = std::exchange(other.arena_, nullptr);
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  owner_ = std::exchange(other.owner_, 0);
  return *this;
}

Block::~Block() {
  if (data_ != nullptr) arena_->ReturnBlock(*this);
}

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  if (this == &other) return *this;
  if (arena_ != nullptr) arena_->Release(block_bytes_, count_);
  arena_ = std::exchange(other.arena_, nullptr);
  block_bytes_ = std::exchange(other.block_bytes_, 0);
  count_ = std::exchange(other.count_, 0);
  owner_ = std::exchange(other.owner_, 0);
  stream_ = std::exchange(other.stream_, nullptr);
  return *this;
}

Reservation::~Reservation() {
  if (arena_ != nullptr) arena_->Release(block_bytes_, count_);
}

Block Reservation::Take() {
  CTKVR_CHECK(arena_ != nullptr);
  Block block;
  block.data_ = arena_->TakeBlock(*this);
  block.arena_ = arena_;
  block.bytes_ = block_bytes_;
  block.owner_ = owner_;
  return block;
}

absl::StatusOr<std::unique_ptr<Arena>> Arena::Create(Backend& backend, size_t bytes) {
  const size_t slab_count = bytes / kSlabBytes;
  if (slab_count == 0 || slab_count > std::numeric_limits<uint32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat("arena bytes is ", bytes, "; it must be at least one slab of ",
                                                   kSlabBytes, " bytes and at most ",
                                                   std::numeric_limits<uint32_t>::max(), " slabs"));
  }
  CTKVR_ASSIGN_OR_RETURN(DeviceBuffer memory, backend.Allocate(slab_count * kSlabBytes));
  return std::unique_ptr<Arena>(new Arena(backend, std::move(memory), slab_count));
}

Arena::Arena(Backend& backend, DeviceBuffer memory, size_t slab_count)
    : backend_(backend), memory_(std::move(memory)), slab_count_(slab_count), slab_writers_(slab_count, kNobody) {
  free_slabs_.reserve(slab_count);
  for (size_t slab = slab_count; slab-- > 0;) free_slabs_.push_back(static_cast<uint32_t>(slab));
}

Arena::~Arena() {
  const std::lock_guard lock(mutex_);
  CTKVR_CHECK(reserved_bytes_ == 0 && "a Reservation outlives its Arena");
}

absl::StatusOr<std::vector<Reservation>> Arena::Reserve(std::span<const Request> requests, const Holder& holder) {
  const std::lock_guard lock(mutex_);
  // Blocks of one size may be asked for several times, so they are summed before anything is decided.
  std::map<size_t, uint64_t> wanted;
  uint64_t slabs_needed = 0;
  for (const Request& request : requests) {
    const size_t block_bytes = RoundUp(request.block_bytes, kBlockAlignment);
    if (request.block_bytes == 0 || request.block_bytes > kSlabBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("block_bytes is ", request.block_bytes, "; the limit is 1 to ", kSlabBytes));
    }
    uint64_t& sum = wanted[block_bytes];
    // Far above what any arena holds, and far below where sums overflow.
    sum = std::min(sum + std::min(request.count, uint64_t{1} << 40), uint64_t{1} << 40);
  }
  for (const auto& [block_bytes, count] : wanted) {
    const auto found = classes_.find(block_bytes);
    const uint64_t reserved = found == classes_.end() ? 0 : found->second.reserved;
    const uint64_t owned = found == classes_.end() ? 0 : found->second.slabs.size();
    const uint64_t slabs = CeilDiv(reserved + count, uint64_t{kSlabBytes / block_bytes});
    if (slabs > owned) slabs_needed += slabs - owned;
  }
  if (slabs_needed > free_slabs_.size()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("not enough memory for the reservation: ", slabs_needed * kSlabBytes, " bytes needed, ",
                     free_slabs_.size() * kSlabBytes, " bytes free"));
  }
  for (const auto& [block_bytes, count] : wanted) {
    if (count > 0) GrowLocked(block_bytes, count);
  }
  std::vector<Reservation> reservations(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    reservations[i].block_bytes_ = RoundUp(requests[i].block_bytes, kBlockAlignment);
    reservations[i].count_ = requests[i].count;
    reservations[i].arena_ = this;
    reservations[i].owner_ = holder.owner;
    reservations[i].stream_ = holder.stream;
  }
  return reservations;
}

void Arena::GrowLocked(size_t block_bytes, uint64_t count) {
  SizeClass& size_class = classes_[block_bytes];
  size_class.blocks_per_slab = kSlabBytes / block_bytes;
  size_class.reserved += count;
  reserved_bytes_ += count * block_bytes;
  while (size_class.slabs.size() < size_class.SlabsFor(size_class.reserved)) {
    const uint32_t slab = free_slabs_.back();
    free_slabs_.pop_back();
    size_class.slabs[slab].fresh_writer = slab_writers_[slab];
    size_class.open.insert(slab);
  }
}

// Zeroed without the lock: the block is nobody else's by then.
std::byte* Arena::TakeBlock(const Reservation& reservation) {
  bool clear = false;
  std::byte* const data = FindBlock(reservation, &clear);
  if (!clear) return data;
  CTKVR_CHECK(reservation.stream_ != nullptr && "owners change, and there is no stream to clear on");
  backend_.Clear(*reservation.stream_, data, reservation.block_bytes_);
  cleared_bytes_.fetch_add(reservation.block_bytes_, std::memory_order_relaxed);
  return data;
}

std::byte* Arena::FindBlock(const Reservation& reservation, bool* clear) {
  const size_t block_bytes = reservation.block_bytes_;
  const std::lock_guard lock(mutex_);
  const auto found = classes_.find(block_bytes);
  CTKVR_CHECK(found != classes_.end());
  SizeClass& size_class = found->second;
  CTKVR_CHECK(size_class.held < size_class.reserved && "more blocks taken than reserved");
  const uint32_t slab_id = *size_class.open.begin();
  SizeClass::Slab& slab = size_class.slabs[slab_id];
  uint32_t block = 0;
  uint64_t writer = slab.fresh_writer;
  if (slab.returned.empty()) {
    block = slab.fresh++;
  } else {
    block = slab.returned.back().block;
    writer = slab.returned.back().writer;
    slab.returned.pop_back();
  }
  *clear = writer != kNobody && writer != reservation.owner_;
  if (++slab.held == size_class.blocks_per_slab) size_class.open.erase(slab_id);
  ++size_class.held;
  held_bytes_ += block_bytes;
  return memory_.data() + slab_id * kSlabBytes + block * block_bytes;
}

void Arena::ReturnBlock(const Block& block) {
  const size_t block_bytes = block.bytes_;
  const std::lock_guard lock(mutex_);
  SizeClass& size_class = classes_.at(block_bytes);
  const auto offset = static_cast<size_t>(block.data_ - memory_.data());
  const auto slab_id = static_cast<uint32_t>(offset / kSlabBytes);
  SizeClass::Slab& slab = size_class.slabs.at(slab_id);
  slab.returned.push_back({static_cast<uint32_t>(offset % kSlabBytes / block_bytes), block.owner_});
  --slab.held;
  --size_class.held;
  held_bytes_ -= block_bytes;
  size_class.open.insert(slab_id);
  // No other slab can have become spare, so there is nothing to search for.
  if (slab.held == 0 && size_class.HasSpareSlab()) {
    slab_writers_[slab_id] = slab.Writer(block_bytes);
    free_slabs_.push_back(slab_id);
    size_class.open.erase(slab_id);
    size_class.slabs.erase(slab_id);
  }
}

void Arena::Release(size_t block_bytes, uint64_t count) {
  if (count == 0) return;
  const std::lock_guard lock(mutex_);
  SizeClass& size_class = classes_.at(block_bytes);
  CTKVR_CHECK(size_class.held + count <= size_class.reserved && "a Block outlives its Reservation");
  size_class.reserved -= count;
  reserved_bytes_ -= count * block_bytes;
  ShrinkLocked(size_class, block_bytes);
  if (size_class.slabs.empty()) classes_.erase(block_bytes);
}

// Gives back empty slabs that no promise needs, the highest first.
void Arena::ShrinkLocked(SizeClass& size_class, size_t block_bytes) {
  for (auto it = size_class.open.end(); it != size_class.open.begin() && size_class.HasSpareSlab();) {
    --it;
    if (size_class.slabs[*it].held != 0) continue;
    slab_writers_[*it] = size_class.slabs[*it].Writer(block_bytes);
    free_slabs_.push_back(*it);
    size_class.slabs.erase(*it);
    it = size_class.open.erase(it);
  }
}

size_t Arena::free_bytes() const {
  const std::lock_guard lock(mutex_);
  return free_slabs_.size() * kSlabBytes;
}

size_t Arena::reserved_bytes() const {
  const std::lock_guard lock(mutex_);
  return reserved_bytes_;
}

size_t Arena::held_bytes() const {
  const std::lock_guard lock(mutex_);
  return held_bytes_;
}

}  // namespace ctkvr
