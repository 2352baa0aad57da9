#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "backends/nccl/buffers.h"
#include "backends/nccl/check.h"
#include "backends/nccl/endpoint.h"
#include "backends/nccl/group.h"
#include "backends/nccl/handle.h"
#include "backends/nccl/streams.h"
#include "backends/nccl/work_log.h"

namespace ppfsdp::nccl {

/// One communication with its tensors.
struct Operation {
  What what;
  /// In-place operations have one tensor, `output`; so have messages.
  at::Tensor output, input;
};

/// Issues the operations of one group.
///
/// What is compared. Of the first Settings::checked collectives of a group the ranks' calls are
/// compared before anything of the operation moves. This takes a wait of the host, which is put off
/// on side streams: the comparison is under way at once, and the host waits for it, and issues the
/// operation, when the stream or the group is next used. So ranks may use two groups in different
/// orders, once NCCL has connected them: at a group's first operation of a kind, and a message's
/// first between two ranks, NCCL's call itself waits for the other ranks to make theirs (for
/// collectives not with NCCL_RUNTIME_CONNECT=0). On the compute stream the host waits at once,
/// because LibTorch uses that stream unasked. After the first ones the calls of every 64th
/// collective are compared beside the operation, and a difference found ends the rank's
/// communication afterwards; of all_to_all these leave the splits out. Of messages the receiver
/// compares the first Settings::checked of each sender with what that one has put into the store:
/// it waits for the sender to have issued them.
///
/// Messages. NCCL runs the operations of a communicator one after another, on whichever streams
/// they are, and a send is not over before its receive. Ranks that each send first and then receive
/// would wait for each other for ever. So messages on side streams are collected and issued as one
/// group of NCCL, in which all make progress at once, when one of their streams or the group is
/// next used, or the runtime ends. All streams of such a group go on when all its messages are
/// through. On the compute stream a message is issued at once.
class Issuer final : public Deferred, public std::enable_shared_from_this<Issuer> {
 public:
  Issuer(std::shared_ptr<Endpoint> endpoint, GroupPtr group, std::shared_ptr<Handle> handle);

  const Group& group() const { return *group_; }
  const GroupPtr& group_ptr() const { return group_; }
  Endpoint& endpoint() const { return *endpoint_; }
  const std::shared_ptr<Endpoint>& endpoint_ptr() const { return endpoint_; }
  Handle& handle() const { return *handle_; }
  BufferPool& buffers() const { return *buffers_; }

  void collective(Operation operation, const std::shared_ptr<NcclStream>& stream);
  /// Numbers the message itself.
  void message(const at::Tensor& tensor, int peer, bool sends,
               const std::shared_ptr<NcclStream>& stream);
  /// Compares the calls of an operation that has nothing for a stream to do. The host waits.
  void agree(const What& what, NcclStream& stream);

  void issue() override;
  void end() override;

 private:
  struct Waiting {
    Operation operation;
    std::shared_ptr<NcclStream> stream;
    /// Of a collective; messages have none.
    std::unique_ptr<Check> check;
  };

  std::unique_ptr<Check> start_check(const What& what, bool lists, NcclStream& stream);
  /// Waits for the comparison, makes that of the lists if the call has any, and throws what
  /// differs.
  void finish_check(const What& what, const Check& check, NcclStream& stream);
  void launch(Operation operation, NcclStream& stream);
  void launch_messages(std::vector<Waiting> messages);
  /// Lets `ask` use the store; an error of that is a CommError of the operation.
  void ask_store(const What& what, c10::function_ref<void(c10d::Store&)> ask);
  void compare_with_sender(const What& what);
  void note(What what, const NcclStream& stream, std::shared_ptr<const Check> check = nullptr,
            bool prelude = false);

  const std::shared_ptr<Endpoint> endpoint_;
  const GroupPtr group_;
  const std::shared_ptr<Handle> handle_;
  const std::shared_ptr<BufferPool> buffers_;
  /// Messages so far to and from each rank.
  std::vector<uint64_t> sent_, received_;
  /// One collective, or messages.
  std::vector<Waiting> waiting_;
};

}  // namespace ppfsdp::nccl
