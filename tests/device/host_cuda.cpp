// A CUDA device for a build of torch without CUDA: one device, one stream, every event already reached.
//
// Autograd asks the device guard for streams and events, and torch asks the hooks whether CUDA is there. With both, a
// backward pass over tensors on cuda:0 runs as on a GPU: in the thread of the device, through the same hooks.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceType kDevice = c10::DeviceType::CUDA;

c10::Stream only_stream() {
  return c10::Stream(c10::Stream::DEFAULT, c10::Device(kDevice, 0));
}

struct OneStreamGuard final : c10::impl::NoOpDeviceGuardImpl<kDevice> {
  c10::Device getDevice() const override {
    return c10::Device(kDevice, 0);
  }
  c10::Device exchangeDevice(c10::Device /*device*/) const override {
    return getDevice();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  c10::Stream getStream(c10::Device /*device*/) const noexcept override {
    return only_stream();
  }
  c10::Stream getNewStream(c10::Device /*device*/, int /*priority*/) const override {
    return only_stream();
  }
  c10::Stream exchangeStream(c10::Stream /*stream*/) const noexcept override {
    return only_stream();
  }
  bool queryStream(const c10::Stream& /*stream*/) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {}
  void record(void** /*event*/, const c10::Stream& /*stream*/, const c10::DeviceIndex /*device*/,
              const c10::EventFlag /*flag*/) const override {}
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override {
    return true;
  }
};

c10::impl::DeviceGuardImplRegistrar register_guard(kDevice, new OneStreamGuard());

}  // namespace

namespace at {

struct OneDeviceHooks final : CUDAHooksInterface {
  explicit OneDeviceHooks(CUDAHooksArgs /*args*/) {}
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasCUDA() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex /*device*/) const override {
    return true;
  }
  int getNumGPUs() const override {
    return 1;
  }
  DeviceIndex deviceCount() const override {
    return 1;
  }
  DeviceIndex current_device() const override {
    return 0;
  }
  DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  DeviceIndex exchangeDevice(DeviceIndex /*device*/) const override {
    return 0;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex /*device*/) const override {
    return 0;
  }
  void setCurrentDevice(DeviceIndex /*device*/) const override {}
  void deviceSynchronize(DeviceIndex /*device*/) const override {}
};

// torch looks hooks up by this name.
using CUDAHooks = OneDeviceHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
