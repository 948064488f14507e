// A simulated accelerator for tests, on the dispatch key that torch keeps for devices of others (PrivateUse1).
// Each stream is a queue with a worker thread; copies and writing operations
// are queued, so a missing wait between streams or with the host shows.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <shared_mutex>
#include <thread>

namespace {

constexpr auto kDev = c10::DeviceType::PrivateUse1;
constexpr int kMaxStreams = 32; // per device, then handed out again, as CUDA does
constexpr int kPoison = 0xDB;

// ---------------------------------------------------------------- control
struct Control {
  std::atomic<int64_t> copy_us{0}, op_us{0}, copies{0}, ops{0}, bytes{0};
  std::atomic<bool> poison{true}, closing{false};
  const pid_t pid = getpid();
  const int devices = [] {
    const char* n = std::getenv("SIMULATED_ACCELERATORS");
    return n ? std::max(1, std::min(8, std::atoi(n))) : 1;
  }();
};
Control& ctl() {
  static auto* c = new Control; // never destroyed: worker threads outlive main
  return *c;
}

// ---------------------------------------------------------------- streams
using Task = std::function<void()>;
thread_local bool t_worker = false;

struct Queue {
  std::mutex m;
  std::condition_variable cv;
  std::deque<Task> tasks;
  bool busy = false, held = false, started = false;

  void push(Task t) {
    TORCH_CHECK(getpid() == ctl().pid, "simulated accelerator: not usable in a forked child, use spawn");
    std::lock_guard<std::mutex> l(m);
    tasks.push_back(std::move(t));
    if (!started) {
      started = true;
      std::thread([this] { run(); }).detach();
    }
    cv.notify_all();
  }
  void run() {
    t_worker = true;
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    std::unique_lock<std::mutex> l(m);
    for (;;) {
      cv.wait(l, [&] { return !held && !tasks.empty() && !ctl().closing; });
      Task t = std::move(tasks.front());
      tasks.pop_front();
      busy = true;
      l.unlock();
      try {
        t();
      } catch (const std::exception& e) {
        std::fprintf(stderr, "simulated accelerator: queued work failed: %s\n", e.what());
        std::abort();
      }
      t = nullptr;
      l.lock();
      busy = false;
    }
  }
  bool idle() {
    std::lock_guard<std::mutex> l(m);
    return tasks.empty() && !busy;
  }
  void hold(bool on) {
    std::lock_guard<std::mutex> l(m);
    held = on;
    cv.notify_all();
  }
};

struct Streams { // id 0 is the default stream
  Queue q[kMaxStreams + 1];
  std::atomic<int> priority[kMaxStreams + 1] = {}; // as given, with no effect
  std::atomic<unsigned> next{0};
};
Streams& streams(int dev) {
  static auto* s = new Streams[ctl().devices];
  return s[dev];
}
thread_local int t_device = 0;
thread_local std::array<c10::StreamId, 8> t_stream{};

Queue& queue_of(int dev, c10::StreamId id) {
  TORCH_CHECK(dev >= 0 && dev < ctl().devices && id >= 0 && id <= kMaxStreams, "simulated accelerator: no such stream");
  return streams(dev).q[id];
}
Queue& queue_of(const c10::Stream& s) {
  return queue_of(s.device_index() < 0 ? t_device : s.device_index(), s.id());
}
Queue& current(int dev) {
  return queue_of(dev, t_stream[dev]);
}

// A point in a queue; a new one for each record, so that a wait keeps its own.
struct Mark {
  std::mutex m;
  std::condition_variable cv;
  bool done = false;
  std::chrono::steady_clock::time_point at;
  void set() {
    std::lock_guard<std::mutex> l(m);
    at = std::chrono::steady_clock::now();
    done = true;
    cv.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> l(m);
    cv.wait(l, [&] { return done; });
  }
  bool query() {
    std::lock_guard<std::mutex> l(m);
    return done;
  }
};
std::shared_ptr<Mark> mark(Queue& q) {
  auto k = std::make_shared<Mark>();
  q.push([k, &q] {
    {
      std::lock_guard<std::mutex> l(q.m);
      q.busy = false; // whoever sees the mark finds the stream idle
    }
    k->set();
  });
  return k;
}
void drain(Queue& q) {
  TORCH_CHECK(!t_worker, "simulated accelerator: a worker may not wait for a stream");
  mark(q)->wait();
}
struct Event {
  std::mutex m;
  std::shared_ptr<Mark> k;
  std::shared_ptr<Mark> get() {
    std::lock_guard<std::mutex> l(m);
    return k;
  }
};

// ---------------------------------------------------------------- memory
// Two mappings of the same pages: the address that tensors carry is closed to
// the host (touching it is a fault), workers use the other.
struct Block {
  char* face = nullptr;
  char* body = nullptr;
  size_t size = 0;
  int device = 0;
  c10::StreamId stream = 0; // allocated on
  std::set<c10::StreamId> used_on; // record_stream
  ~Block() {
    if (face) munmap(face, size);
    if (body) munmap(body, size);
  }
};
struct Memory {
  std::shared_mutex m;
  std::map<const char*, std::shared_ptr<Block>> blocks;
  std::map<const char*, size_t> pinned;
  int64_t now = 0, peak = 0;
};
Memory& mem() {
  static auto* x = new Memory;
  return *x;
}
std::shared_ptr<Block> block_of(const void* p) {
  std::shared_lock<std::shared_mutex> l(mem().m);
  auto it = mem().blocks.upper_bound(static_cast<const char*>(p));
  if (it == mem().blocks.begin()) return nullptr;
  --it;
  return static_cast<const char*>(p) < it->first + it->second->size ? it->second : nullptr;
}
bool is_pinned(const void* p) {
  std::shared_lock<std::shared_mutex> l(mem().m);
  auto it = mem().pinned.upper_bound(static_cast<const char*>(p));
  if (it == mem().pinned.begin()) return false;
  --it;
  return static_cast<const char*>(p) < it->first + it->second;
}

void release_block(void* face) {
  if (!face) return;
  std::shared_ptr<Block> b;
  {
    std::unique_lock<std::shared_mutex> l(mem().m);
    auto it = mem().blocks.find(static_cast<char*>(face));
    if (it == mem().blocks.end()) return;
    b = it->second;
    mem().blocks.erase(it);
    mem().now -= static_cast<int64_t>(b->size);
  }
  if (!ctl().poison || ctl().closing || getpid() != ctl().pid) return;
  // As if the allocator gave the memory away again: in order of the stream it
  // was allocated on and of those given to record_stream, of no other.
  auto& home = queue_of(b->device, b->stream);
  std::vector<std::shared_ptr<Mark>> first;
  for (auto id : b->used_on) {
    if (id != b->stream) first.push_back(mark(queue_of(b->device, id)));
  }
  home.push([b, first] {
    for (auto& k : first) k->wait();
    std::memset(b->body, kPoison, b->size);
  });
}

struct Allocator final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t n) override {
    const c10::Device d(kDev, static_cast<c10::DeviceIndex>(t_device));
    if (n == 0) return {nullptr, nullptr, &release_block, d};
    auto b = std::make_shared<Block>();
    b->size = (n + 4095) / 4096 * 4096;
    b->device = t_device;
    b->stream = t_stream[t_device];
    const int fd = memfd_create("simulated-accelerator", MFD_CLOEXEC);
    TORCH_CHECK(fd >= 0, "simulated accelerator: memfd_create failed");
    void *f = MAP_FAILED, *o = MAP_FAILED;
    if (ftruncate(fd, static_cast<off_t>(b->size)) == 0) {
      f = mmap(nullptr, b->size, PROT_NONE, MAP_SHARED, fd, 0);
      o = mmap(nullptr, b->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    close(fd);
    if (f != MAP_FAILED) b->face = static_cast<char*>(f);
    if (o != MAP_FAILED) b->body = static_cast<char*>(o);
    TORCH_CHECK(b->face && b->body, "simulated accelerator: out of memory (", n, " bytes)");
    if (ctl().poison) { // an empty tensor has rubbish in it
      std::memset(b->body, kPoison, std::min<size_t>(b->size, 1 << 20));
    }
    std::unique_lock<std::shared_mutex> l(mem().m);
    mem().blocks[b->face] = b;
    mem().now += static_cast<int64_t>(b->size);
    mem().peak = std::max(mem().peak, mem().now);
    return {b->face, b->face, &release_block, d};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release_block; }
  void copy_data(void* to, const void* from, size_t n) const override {
    auto a = block_of(to), b = block_of(from);
    std::memcpy(a->body + (static_cast<char*>(to) - a->face), b->body + (static_cast<const char*>(from) - b->face), n);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    if (auto b = block_of(p.get())) {
      std::unique_lock<std::shared_mutex> l(mem().m);
      b->used_on.insert(s.id());
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats s;
    std::shared_lock<std::shared_mutex> l(mem().m);
    for (auto* x : {&s.allocated_bytes[0], &s.reserved_bytes[0], &s.active_bytes[0]}) {
      x->current = mem().now;
      x->peak = mem().peak;
    }
    return s;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::unique_lock<std::shared_mutex> l(mem().m);
    mem().peak = mem().now;
  }
};
Allocator g_alloc;

void free_pinned(void* p) {
  if (!p) return;
  {
    std::unique_lock<std::shared_mutex> l(mem().m);
    mem().pinned.erase(static_cast<char*>(p));
  }
  std::free(p);
}
struct HostAlloc final : at::HostAllocator {
  at::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    if (n) {
      TORCH_CHECK(posix_memalign(&p, 4096, n) == 0, "simulated accelerator: out of host memory");
      std::unique_lock<std::shared_mutex> l(mem().m);
      mem().pinned[static_cast<char*>(p)] = n;
    }
    return {p, p, &free_pinned, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; } // queued work keeps it
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
HostAlloc g_host;

// ---------------------------------------------------------------- guard, hooks
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDev;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kDev; }
  c10::Device getDevice() const override { return {kDev, static_cast<c10::DeviceIndex>(t_device)}; }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < ctl().devices, "simulated accelerator: no device ", d);
    if (d.index() >= 0) t_device = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) t_device = d.index();
  }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    setDevice(d);
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(ctl().devices); }
  c10::DeviceIndex at_(c10::Device d) const { return static_cast<c10::DeviceIndex>(d.index() < 0 ? t_device : d.index()); }
  c10::Stream mk(c10::DeviceIndex i, c10::StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDev, i), id); }
  c10::Stream getStream(c10::Device d) const override { return mk(at_(d), t_stream[at_(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return mk(at_(d), 0); }
  c10::Stream getNewStream(c10::Device d, int priority) const override {
    auto& all = streams(at_(d));
    const c10::StreamId id = 1 + all.next++ % kMaxStreams;
    all.priority[id] = priority;
    return mk(at_(d), id);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    t_stream[at_(s.device())] = s.id();
    return old;
  }
  void record(void** e, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*e) *e = new Event;
    auto* ev = static_cast<Event*>(*e);
    auto k = mark(queue_of(s));
    std::lock_guard<std::mutex> l(ev->m);
    ev->k = std::move(k);
  }
  void block(void* e, const c10::Stream& s) const override {
    if (!e) return;
    queue_of(s).push([k = static_cast<Event*>(e)->get()] { k->wait(); });
  }
  bool queryEvent(void* e) const override { return !e || static_cast<Event*>(e)->get()->query(); }
  void synchronizeEvent(void* e) const override {
    if (e) static_cast<Event*>(e)->get()->wait();
  }
  void destroyEvent(void* e, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(e); }
  double elapsedTime(void* a, void* b, c10::DeviceIndex) const override {
    TORCH_CHECK(a && b, "simulated accelerator: both events must be recorded");
    auto x = static_cast<Event*>(a)->get(), y = static_cast<Event*>(b)->get();
    TORCH_CHECK(x->query() && y->query(), "simulated accelerator: both events must be complete");
    return std::chrono::duration<double, std::milli>(y->at - x->at).count();
  }
  bool queryStream(const c10::Stream& s) const override { return queue_of(s).idle(); }
  void synchronizeStream(const c10::Stream& s) const override { drain(queue_of(s)); }
  void synchronizeDevice(c10::DeviceIndex i) const override {
    for (auto& q : streams(i < 0 ? t_device : i).q) {
      if (!q.idle()) drain(q);
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override { g_alloc.recordStream(p, s); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(ctl().devices); }
  void setCurrentDevice(c10::DeviceIndex i) const override { Guard().setDevice({kDev, i}); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(t_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { return Guard().exchangeDevice({kDev, i}).index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override {
    return i < 0 || i >= ctl().devices ? getCurrentDevice() : exchangeDevice(i);
  }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &g_host; }
  at::Device getDeviceFromPtr(void* p) const override {
    auto b = block_of(p);
    TORCH_CHECK(b, "simulated accelerator: not a device pointer");
    return {kDev, static_cast<c10::DeviceIndex>(b->device)};
  }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    auto old = block_of(s.data());
    c10::DeviceGuard g(s.device());
    auto fresh = g_alloc.allocate(n);
    if (old && n) {
      auto b = block_of(fresh.get());
      current(b->device).push([old, b, k = std::min(n, s.nbytes())] { std::memcpy(b->body, old->body, k); });
    }
    const_cast<c10::Storage&>(s).set_data_ptr_noswap(std::move(fresh));
    const_cast<c10::Storage&>(s).set_nbytes(n);
  }
};

// ---------------------------------------------------------------- operators
// A CPU tensor over the open mapping of a device tensor. It keeps the pages,
// not the tensor: a tensor freed too early is poisoned under it.
at::Tensor body_of(const at::Tensor& t) {
  if (!t.defined() || t.device().type() != kDev) return t;
  auto o = t.options().device(at::kCPU);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), o);
  const auto* p = static_cast<const char*>(t.const_data_ptr());
  auto b = block_of(p);
  TORCH_CHECK(b, "simulated accelerator: unknown device memory");
  return at::from_blob(b->body + (p - b->face), t.sizes(), t.strides(), [b](void*) {}, o);
}
// The same for a host tensor: keeps its storage and no Python object.
at::Tensor host_of(const at::Tensor& t) {
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [s = t.storage()](void*) {}, t.options());
}
void nap(int64_t us) {
  if (us) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  const bool from_host = src.is_cpu(), to_host = dst.is_cpu();
  if (src.numel() == 0 && dst.numel() == 0) return dst;
  const int dev = from_host ? dst.device().index() : src.device().index();
  auto& q = current(dev);
  // As CUDA: from pageable host memory it is staged, to it the call waits.
  bool wait = (from_host || to_host) && !non_blocking;
  at::Tensor a = from_host ? src : body_of(src), b = to_host ? dst : body_of(dst);
  if (from_host) a = wait || is_pinned(src.const_data_ptr()) ? host_of(src) : src.clone();
  if (to_host) {
    wait = wait || !is_pinned(dst.const_data_ptr());
    b = host_of(dst);
  }
  if (!from_host && !to_host && src.device() != dst.device()) { // both sides in order
    auto k = mark(current(dst.device().index()));
    q.push([k] { k->wait(); });
  }
  q.push([a, b]() mutable {
    nap(ctl().copy_us);
    ctl().copies++;
    ctl().bytes += static_cast<int64_t>(b.nbytes());
    if (a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.is_contiguous() && b.is_contiguous()) {
      std::memcpy(b.data_ptr(), a.const_data_ptr(), b.nbytes());
    } else {
      b.copy_(a);
    }
  });
  if (!from_host && !to_host && src.device() != dst.device()) {
    auto k = mark(q);
    current(dst.device().index()).push([k] { k->wait(); });
  }
  if (wait) drain(q);
  return dst;
}
at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  dst.resize_(src.sizes());
  return copy_from(src, dst, false);
}

// Many copies by one call on the current stream, from and to raw addresses. The
// descriptors are read when the work runs, as by a device. They are not kept:
// if they are gone by then, nothing is copied and `lost` counts it.
std::atomic<int64_t> lost{0};
char* reachable(int64_t address, int64_t n, std::vector<std::shared_ptr<Block>>& kept) {
  auto* p = reinterpret_cast<char*>(address);
  auto b = block_of(p);
  if (!b) return p;
  TORCH_CHECK(p + n <= b->face + b->size, "simulated accelerator: a batched copy beyond the memory");
  kept.push_back(b);
  return b->body + (p - b->face);
}
void copy_batch(const at::Tensor& src, const at::Tensor& dst, const at::Tensor& sizes) {
  for (const auto& t : {src, dst, sizes}) {
    TORCH_CHECK(t.is_cpu() && t.scalar_type() == at::kLong && t.is_contiguous() && t.dim() == 1 && t.numel() == src.numel(),
        "simulated accelerator: descriptors must be int64 CPU tensors of one length");
  }
  TORCH_CHECK(t_stream[t_device] != 0, "simulated accelerator: no batched copy on the default stream");
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  std::vector<std::pair<Weak, const int64_t*>> given;
  for (const auto& t : {src, dst, sizes}) {
    auto whole = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(t.storage().unsafeGetStorageImpl());
    given.emplace_back(Weak(whole), t.const_data_ptr<int64_t>());
  }
  std::vector<std::shared_ptr<Block>> kept; // pages live, as those of a freed tensor do
  for (int64_t i = 0; i < src.numel(); ++i) {
    for (const auto& t : {src, dst}) reachable(t.const_data_ptr<int64_t>()[i], sizes.const_data_ptr<int64_t>()[i], kept);
  }
  current(t_device).push([given, kept, count = src.numel()]() mutable {
    std::vector<c10::intrusive_ptr<c10::StorageImpl>> held;
    for (auto& g : given) {
      if (auto s = g.first.lock()) held.push_back(std::move(s));
    }
    if (held.size() < given.size()) {
      lost++;
      return;
    }
    auto *from = given[0].second, *to = given[1].second, *n = given[2].second;
    for (int64_t i = 0; i < count; ++i) {
      nap(ctl().copy_us);
      ctl().copies++;
      ctl().bytes += n[i];
      std::memcpy(reachable(to[i], n[i], kept), reachable(from[i], n[i], kept), n[i]);
    }
  });
}

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> fmt) {
  c10::DeviceGuard g(c10::device_or_default(device));
  return at::detail::empty_generic(size, &g_alloc, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), fmt);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard g(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &g_alloc, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
void record_stream(at::Tensor& t, c10::Stream s) { g_alloc.recordStream(t.storage().data_ptr(), s); }

// Views of the kinds that have a CPU kernel: metadata only.
at::Tensor sim_as_strided(const at::Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> off) {
  auto r = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(t.storage()), t.key_set(), t.dtype());
  auto* i = r.unsafeGetTensorImpl();
  i->set_sizes_and_strides(size, stride, off.value_or(t.storage_offset()));
  return r;
}
at::Tensor sim_reshape_alias(const at::Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return sim_as_strided(t, size, stride, t.storage_offset());
}
at::Tensor sim_view(const at::Tensor& t, c10::IntArrayRef size) {
  auto full = at::infer_size_dv(size, t.numel());
  auto stride = at::detail::computeStride(t.sizes(), t.strides(), full);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with the tensor's size and stride; use reshape");
  return sim_as_strided(t, full, *stride, t.storage_offset());
}
at::Tensor sim_unfold(const at::Tensor& t, int64_t dim, int64_t size, int64_t step) {
  dim = c10::maybe_wrap_dim(dim, t.dim());
  auto sz = t.sizes().vec(), st = t.strides().vec();
  TORCH_CHECK(size <= sz[dim] && step > 0, "unfold: bad size or step");
  sz.push_back(size);
  st.push_back(st[dim]);
  sz[dim] = (sz[dim] - size) / step + 1;
  st[dim] *= step;
  return sim_as_strided(t, sz, st, t.storage_offset());
}
at::Tensor& set_storage_offset(at::Tensor& t, c10::Storage s, int64_t off, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* i = t.unsafeGetTensorImpl();
  i->set_storage_keep_dtype(std::move(s));
  std::vector<int64_t> st = stride.vec();
  if (st.size() != size.size()) {
    st.assign(size.size(), 1);
    for (int k = static_cast<int>(size.size()) - 2; k >= 0; --k) st[k] = st[k + 1] * size[k + 1];
  }
  i->set_sizes_and_strides(size, st, off);
  const auto need = off + at::detail::computeStorageNbytes(size, st, t.element_size()) / t.element_size();
  TORCH_CHECK(static_cast<size_t>(need) * t.element_size() <= i->unsafe_storage().nbytes(), "simulated accelerator: set_ beyond the storage");
  return t;
}
at::Tensor& set_storage(at::Tensor& t, c10::Storage s) {
  const int64_t n = static_cast<int64_t>(s.nbytes() / t.element_size());
  return set_storage_offset(t, std::move(s), 0, {n}, {1});
}
at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& o) {
  return set_storage_offset(t, o.storage(), o.storage_offset(), o.sizes(), o.strides());
}
const at::Tensor& resize(const at::Tensor& t, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* i = t.unsafeGetTensorImpl();
  if (t.sizes() == size) return t;
  i->set_sizes_contiguous(size);
  const size_t need = (t.storage_offset() + t.numel()) * t.element_size();
  if (need > t.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(t.storage(), need);
  return t;
}

// Every other operator runs on CPU tensors over the device's pages: queued if
// it writes one given tensor and returns it, else at once after its inputs.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& args = op.schema().arguments();
  const auto& rets = op.schema().returns();
  const size_t n = args.size();
  std::vector<c10::IValue> in(stack->end() - n, stack->end());
  int dev = -1, out = -1, writes = 0;
  auto see = [&](const at::Tensor& t) {
    if (dev < 0 && t.defined() && t.device().type() == kDev) dev = t.device().index();
  };
  for (size_t i = 0; i < n; ++i) {
    if (in[i].isTensor()) see(in[i].toTensor());
    else if (in[i].isTensorList()) for (const auto& t : in[i].toTensorVector()) see(t);
    else if (in[i].isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& t : in[i].toOptionalTensorVector()) if (t) see(*t);
    } else if (in[i].isDevice() && in[i].toDevice().type() == kDev && dev < 0) {
      dev = std::max<int>(0, in[i].toDevice().index());
    }
    if (args[i].alias_info() && args[i].alias_info()->isWrite()) {
      out = static_cast<int>(i);
      ++writes;
    }
  }
  if (dev < 0) dev = t_device;
  const bool queued = writes == 1 && rets.size() == 1 && rets[0].alias_info() && in[out].isTensor() &&
      in[out].toTensor().device().type() == kDev && in[out].toTensor().numel() > 0;
  auto& q = current(dev);
  std::vector<std::pair<at::Tensor, at::Tensor>> made; // device tensor, its CPU twin
  auto twin = [&](const at::Tensor& t) -> at::Tensor {
    if (!t.defined()) return t;
    if (t.is_cpu()) return queued && t.numel() ? t.clone() : t; // the host may change it later
    if (t.device().type() != kDev) return t;
    for (auto& m : made) if (m.first.is_same(t)) return m.second;
    made.emplace_back(t, body_of(t));
    return made.back().second;
  };
  if (!queued) drain(q);
  torch::jit::Stack st;
  for (auto& v : in) {
    if (v.isTensor()) st.emplace_back(twin(v.toTensor()));
    else if (v.isTensorList()) {
      c10::List<at::Tensor> l;
      for (const auto& t : v.toTensorVector()) l.push_back(twin(t));
      st.emplace_back(std::move(l));
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> l;
      for (const std::optional<at::Tensor>& t : v.toOptionalTensorVector()) l.push_back(t ? std::optional<at::Tensor>(twin(*t)) : std::nullopt);
      st.emplace_back(std::move(l));
    } else if (v.isDevice() && v.toDevice().type() == kDev) st.emplace_back(c10::Device(at::kCPU));
    else st.push_back(v);
  }
  ctl().ops++;
  stack->resize(stack->size() - n);
  if (queued) {
    q.push([op, st = std::move(st)]() mutable {
      nap(ctl().op_us);
      op.callBoxed(&st);
    });
    stack->push_back(in[out]);
    return;
  }
  {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    op.callBoxed(&st);
  }
  for (auto& m : made) { // an out= tensor that was empty and has grown
    if (m.first.numel() == 0 && m.second.numel() > 0) {
      m.first.resize_(m.second.sizes());
      copy_from(m.second, m.first, false);
    }
  }
  const c10::Device d(kDev, static_cast<c10::DeviceIndex>(dev));
  auto back = [&](const at::Tensor& t) -> at::Tensor {
    if (!t.defined()) return t;
    for (auto& m : made) if (m.second.is_same(t)) return m.first;
    return t.is_cpu() ? t.to(d) : t;
  };
  for (auto& v : st) {
    if (v.isTensor()) stack->emplace_back(back(v.toTensor()));
    else if (v.isTensorList()) {
      c10::List<at::Tensor> l;
      for (const auto& t : v.toTensorVector()) l.push_back(back(t));
      stack->emplace_back(std::move(l));
    } else stack->push_back(v);
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", sim_as_strided);
  m.impl("_reshape_alias", sim_reshape_alias);
  m.impl("view", sim_view);
  m.impl("unfold", sim_unfold);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
}
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(kDev, &g_alloc);
  at::setHostAllocator(kDev, &g_host);
  static auto* hooks = new Hooks;
  at::RegisterPrivateUse1HooksInterface(hooks);
  m.def("device_count", [] { return ctl().devices; });
  m.def("current_device", [] { return t_device; });
  m.def("set_device", [](int i) { Guard().setDevice({kDev, static_cast<c10::DeviceIndex>(i)}); });
  m.def("is_in_bad_fork", [] { return getpid() != ctl().pid; });
  m.def("set_delay_us", [](int64_t c, int64_t o) { ctl().copy_us = c; ctl().op_us = o; });
  m.def("pin", [](int64_t p, int64_t n) {
    std::unique_lock<std::shared_mutex> l(mem().m);
    mem().pinned[reinterpret_cast<char*>(p)] = n;
  });
  m.def("unpin", [](int64_t p) {
    std::unique_lock<std::shared_mutex> l(mem().m);
    mem().pinned.erase(reinterpret_cast<char*>(p));
  });
  m.def("set_poison", [](bool on) { ctl().poison = on; });
  m.def("hold", [](int dev, int64_t id, bool on) { queue_of(dev, id).hold(on); });
  m.def("counts", [] {
    py::dict d;
    d["copies"] = ctl().copies.load();
    d["bytes"] = ctl().bytes.load();
    d["ops"] = ctl().ops.load();
    return d;
  });
  m.def("priority", [](int dev, int64_t id) { return streams(dev).priority[id].load(); });
  m.def("copy_batch", &copy_batch);
  m.def("lost", [] { return lost.load(); });
  m.def("close", [] { // at exit: no further task; let those running end
    ctl().closing = true;
    for (int d = 0; d < ctl().devices; ++d) {
      for (auto& q : streams(d).q) {
        for (int i = 0; i < 200; ++i) {
          {
            std::lock_guard<std::mutex> l(q.m);
            if (!q.busy) break;
          }
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
      }
    }
  }, py::call_guard<py::gil_scoped_release>());
}
