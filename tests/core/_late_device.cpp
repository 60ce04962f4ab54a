// A simulated device for machines without one: own memory, current devices, streams, events.
//
// It is as unforgiving as CUDA may be. A copy on a side stream reads its source late (DELAY) and
// keeps no memory alive; freed memory is overwritten at once, unless a stream was recorded on it.
// A device gets a context as soon as a thread that has it as current device uses it, as CUDA's
// runtime does. The host can neither read nor write at the addresses of its tensors (SIGSEGV): the
// device itself has the same memory mapped a second time.

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 4;
constexpr auto DELAY = std::chrono::milliseconds(300);

thread_local c10::DeviceIndex current_device = 0;
thread_local int64_t current_stream[DEVICES] = {};

std::mutex mutex;
std::set<int64_t> contexts;

void touch() {
  std::lock_guard<std::mutex> lock(mutex);
  contexts.insert(current_device);
}

// One stream: runs jobs in order, in its own thread. Threads end with the process.
struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> jobs;
  int64_t given = 0, done = 0;

  int64_t give(std::function<void()> job) {
    std::lock_guard<std::mutex> lock(mutex);
    jobs.push_back(std::move(job));
    changed.notify_all();
    return ++given;
  }

  void wait(int64_t ticket) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return done >= ticket; });
  }

  bool is_over(int64_t ticket) {
    std::lock_guard<std::mutex> lock(mutex);
    return done >= ticket;
  }

  void run() {
    for (;;) {
      std::function<void()> job;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return !jobs.empty(); });
        job = std::move(jobs.front());
        jobs.pop_front();
      }
      job();
      std::lock_guard<std::mutex> lock(mutex);
      ++done;
      changed.notify_all();
    }
  }
};

std::map<int64_t, Queue*> queues;

// The queue of a stream, or nullptr for a default stream, whose calls are synchronous.
Queue* queue_of(int64_t stream) {
  if (stream == 0) return nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  return queues.at(stream);
}

// -- memory ----------------------------------------------------------------------------------------

struct Block {
  size_t size;
  std::vector<std::pair<Queue*, int64_t>> readers;
};
std::map<void*, Block> blocks;

// By the address that a host must not touch: the size, and the address that the device uses.
std::map<char*, std::pair<size_t, char*>> mapped;

// Translate the address of a tensor into the device's own; return any other address unchanged.
char* own_address(const void* address) {
  auto* at = static_cast<char*>(const_cast<void*>(address));
  std::lock_guard<std::mutex> lock(mutex);
  auto found = mapped.upper_bound(at);
  if (found == mapped.begin()) return at;
  --found;
  auto& [start, block] = *found;
  return at < start + block.first ? block.second + (at - start) : at;
}

// Map new memory twice; return the address that the host must not touch.
void* map_twice(size_t size) {
  int file = memfd_create("late device", 0);
  TORCH_CHECK(file >= 0 && ftruncate(file, size) == 0, "no memory on the late device");
  void* theirs = mmap(nullptr, size, PROT_NONE, MAP_SHARED, file, 0);
  void* own = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  TORCH_CHECK(theirs != MAP_FAILED && own != MAP_FAILED, "no memory on the late device");
  std::memset(own, 0xFF, size);
  std::lock_guard<std::mutex> lock(mutex);
  mapped[static_cast<char*>(theirs)] = {size, static_cast<char*>(own)};
  blocks[theirs] = {size, {}};
  return theirs;
}

void free_memory(void* data) {
  Block block;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto at = blocks.find(data);
    if (at == blocks.end()) return;
    block = at->second;
    blocks.erase(at);
  }
  auto overwrite = [own = own_address(data), size = block.size] { std::memset(own, 0xFF, size); };
  for (auto& [queue, ticket] : block.readers)
    if (!queue->is_over(ticket)) {
      queue->give(overwrite);
      return;
    }
  overwrite();  // The memory is never reused: the tests are small.
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    touch();
    void* data = size ? map_twice(size) : nullptr;
    return {data, data, free_memory, c10::Device(KIND, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return free_memory; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(own_address(to), own_address(from), size);
  }
};
Memory memory;

// -- devices, streams, events ------------------------------------------------------------------------

struct Recorded {
  Queue* queue;
  int64_t ticket;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device getDevice() const override { return {KIND, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < DEVICES);
    if (device.index() == current_device) return;
    current_device = device.index();
    touch();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();  // creates no context, like CUDA's
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  c10::Stream stream(c10::DeviceIndex device, int64_t id) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, device), id);
  }
  c10::DeviceIndex index(c10::Device device) const {
    return device.has_index() ? device.index() : current_device;
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(index(device), current_stream[index(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(index(device), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    std::lock_guard<std::mutex> lock(mutex);
    contexts.insert(index(device));
    auto* queue = new Queue;
    std::thread([queue] { queue->run(); }).detach();
    int64_t id = static_cast<int64_t>(queues.size()) + 1;
    queues[id] = queue;
    return stream(index(device), id);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = getStream(to.device());
    current_stream[to.device_index()] = to.id();
    return before;
  }
  void record(
      void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    touch();
    auto* queue = queue_of(on.id());
    delete static_cast<Recorded*>(*event);
    *event = new Recorded{queue, queue ? queue->give([] {}) : 0};
  }
  void block(void* event, const c10::Stream& on) const override {
    touch();
    auto recorded = *static_cast<Recorded*>(event);
    if (!recorded.queue) return;
    if (auto* queue = queue_of(on.id()))
      queue->give([recorded] { recorded.queue->wait(recorded.ticket); });
    else
      recorded.queue->wait(recorded.ticket);
  }
  bool queryEvent(void* event) const override {
    auto* recorded = static_cast<Recorded*>(event);
    return !recorded || !recorded->queue || recorded->queue->is_over(recorded->ticket);
  }
  void synchronizeEvent(void* event) const override {
    touch();
    auto* recorded = static_cast<Recorded*>(event);
    if (recorded && recorded->queue) recorded->queue->wait(recorded->ticket);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Recorded*>(event);
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto* queue = queue_of(stream.id());
    return !queue || queue->is_over(queue->given);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    touch();
    if (auto* queue = queue_of(stream.id())) queue->wait(queue->give([] {}));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
Guard guard;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override {
    std::lock_guard<std::mutex> lock(mutex);
    return contexts.count(index) > 0;
  }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    guard.setDevice({KIND, index});
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return guard.exchangeDevice({KIND, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
};

// -- operators: a few own ones; the rest run on the CPU ----------------------------------------------

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard at_device(device.value_or(guard.getDevice()));
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(c10::kFloat), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  c10::DeviceGuard at_device(device.value_or(guard.getDevice()));
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(c10::kFloat));
}

// A CPU tensor of the same memory, at the device's own address.
at::Tensor as_cpu(const at::Tensor& t) {
  if (t.device().is_cpu()) return t;
  auto storage = c10::Storage(
      c10::Storage::use_byte_size_t(), t.storage().nbytes(),
      c10::DataPtr(own_address(t.storage().data()), c10::Device(c10::kCPU)));
  auto seen = at::empty({0}, t.options().device(c10::kCPU));
  return at::cpu::set_(seen, storage, t.storage_offset(), t.sizes(), t.strides());
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto device = from.device().is_cpu() ? to.device() : from.device();
  c10::DeviceGuard at_device(device);
  touch();
  auto* queue = queue_of(current_stream[device.index()]);
  bool plain = from.dtype() == to.dtype() && from.is_contiguous() && to.is_contiguous() &&
      from.sizes() == to.sizes();
  if (queue && non_blocking && plain) {
    queue->give([a = own_address(to.data_ptr()), b = own_address(from.data_ptr()),
                 size = from.nbytes()] {
      std::this_thread::sleep_for(DELAY);
      std::memcpy(a, b, size);
    });
    return to;
  }
  if (queue) queue->wait(queue->give([] {}));
  as_cpu(to).copy_(as_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) {
    auto made = empty(from.sizes(), to.scalar_type(), {}, to.device(), {}, {});
    auto* resized = to.unsafeGetTensorImpl();
    resized->set_storage_keep_dtype(made.storage());
    resized->set_sizes_contiguous(from.sizes());
  }
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& self) { return as_cpu(self).item(); }

at::Tensor as_strided(
    const at::Tensor& self,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  auto* queue = queue_of(stream.id());
  if (!queue) return;
  auto ticket = queue->give([] {});
  std::lock_guard<std::mutex> lock(mutex);
  if (auto at = blocks.find(self.storage().mutable_data()); at != blocks.end())
    at->second.readers.emplace_back(queue, ticket);
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

std::vector<int64_t> contexts_made() {
  std::lock_guard<std::mutex> lock(mutex);
  return {contexts.begin(), contexts.end()};
}

}  // namespace

REGISTER_ALLOCATOR(KIND, &memory);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

TORCH_LIBRARY(late_device, m) {
  m.def("contexts() -> int[]", &contexts_made);
  m.def("register_hooks() -> ()", [] {
    at::RegisterPrivateUse1HooksInterface(new Hooks);
  });
}
