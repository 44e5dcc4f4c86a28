/* RDMA into and out of another PCI device's memory, between two guests.
 *
 *   gpudirect -d RDMA-DEVICE -g PCI-ADDRESS [-p PORT] [-s SIZES] [-t MS]            serves one client
 *   gpudirect -d RDMA-DEVICE -g PCI-ADDRESS [-p PORT] [-s SIZES] [-t MS] ADDRESS    the client
 *
 * -g: a function bound to vfio-pci, whose BAR 2 is memory. It is exported as a dma-buf and registered with
 * ibv_reg_dmabuf_mr, so no driver of the device is involved. -s: bytes of the messages, by commas. -t: milliseconds
 * of each measurement.
 *
 * The client writes, reads and sends between the memory of both devices and both guests' system memory; contents are
 * compared by the CPUs of both ends. Then it measures, and at last the server takes its device's memory away
 * (memory decode off), a request must fail, and another registration must work. Output: one line a result,
 * `data …`, `bandwidth …`, `revoked …`; status 0 if all is well. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <linux/vfio.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* linux/vfio.h of older headers lacks these. */
#define FEATURE_GET (1u << 16)
#define FEATURE_DMA_BUF 11
struct dma_buf_request {
    uint32_t argsz, flags;
    uint32_t region_index, open_flags, buf_flags, nr_ranges;
    uint64_t offset, length;
};

#define BAR VFIO_PCI_BAR2_REGION_INDEX
#define MAX_SIZES 16
#define DEPTH 64

enum place { DEVICE, SYSTEM };
static const char *const NAMES[] = {"bar", "ram"};
/* What a queue pair's peer has to know. */
struct end {
    uint32_t qpn, lid, rkey[2];
    uint64_t address[2];
    uint8_t gid[16];
};

static struct {
    const char *rdma, *pci;
    size_t sizes[MAX_SIZES], count, largest;
    int ms;
} args = {.count = 0, .ms = 300};

static int control;          /* connection to the other end */
static int container, device; /* vfio */
static uint64_t config_at;
static int dmabuf;
static uint8_t *memory[2];   /* by place */
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr[2];
static struct end own, peer;
static int gid_index;
static bool ethernet;

static void fail(const char *what, ...) {
    int error = errno;
    va_list list;
    va_start(list, what);
    fprintf(stderr, "gpudirect: ");
    vfprintf(stderr, what, list);
    fprintf(stderr, error ? ": %s\n" : "\n", strerror(error));
    va_end(list);
    exit(1);
}

#define NEED(condition, ...) do { if (!(condition)) fail(__VA_ARGS__); } while (0)

/* The function's group, attached to an IOMMU domain of its own. */
static void open_device(void) {
    char path[256], link[256];
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/iommu_group", args.pci);
    ssize_t n = readlink(path, link, sizeof link - 1);
    NEED(n > 0, "%s has no IOMMU group", args.pci);
    link[n] = 0;
    snprintf(path, sizeof path, "/dev/vfio/%s", strrchr(link, '/') + 1);
    container = open("/dev/vfio/vfio", O_RDWR | O_CLOEXEC);
    int group = open(path, O_RDWR | O_CLOEXEC);
    NEED(container >= 0 && group >= 0, "%s cannot be opened; is %s bound to vfio-pci?", path, args.pci);
    struct vfio_group_status status = {.argsz = sizeof status};
    NEED(!ioctl(group, VFIO_GROUP_GET_STATUS, &status), "group status");
    errno = 0;
    NEED(status.flags & VFIO_GROUP_FLAGS_VIABLE, "other drivers use functions of the group of %s", args.pci);
    NEED(!ioctl(group, VFIO_GROUP_SET_CONTAINER, &container), "the group cannot be added to a container");
    NEED(!ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU), "the IOMMU cannot be set");
    device = ioctl(group, VFIO_GROUP_GET_DEVICE_FD, args.pci);
    NEED(device >= 0, "no descriptor of %s", args.pci);
    struct vfio_region_info info = {.argsz = sizeof info, .index = VFIO_PCI_CONFIG_REGION_INDEX};
    NEED(!ioctl(device, VFIO_DEVICE_GET_REGION_INFO, &info), "config space");
    config_at = info.offset;
}

/* Memory decode and bus mastering on, or off. */
static void set_decode(bool on) {
    uint16_t command = on ? 6 : 0;
    NEED(pwrite(device, &command, 2, config_at + 4) == 2, "the command register cannot be written");
}

static void map_bar(void) {
    struct vfio_region_info info = {.argsz = sizeof info, .index = BAR};
    NEED(!ioctl(device, VFIO_DEVICE_GET_REGION_INFO, &info), "BAR 2");
    errno = 0;
    NEED(info.size >= args.largest, "BAR 2 has only %llu bytes", (unsigned long long)info.size);
    memory[DEVICE] = mmap(NULL, args.largest, PROT_READ | PROT_WRITE, MAP_SHARED, device, info.offset);
    NEED(memory[DEVICE] != MAP_FAILED, "BAR 2 cannot be mapped");
    struct dma_buf_request request = {
        .argsz = sizeof request, .flags = FEATURE_GET | FEATURE_DMA_BUF, .region_index = BAR,
        .open_flags = O_RDWR | O_CLOEXEC, .nr_ranges = 1, .length = args.largest};
    dmabuf = ioctl(device, VFIO_DEVICE_FEATURE, &request);
    NEED(dmabuf >= 0, "BAR 2 cannot be exported as a dma-buf; that needs Linux 7.0 with VFIO_PCI_DMABUF");
}

static void register_bar(void) {
    int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    mr[DEVICE] = ibv_reg_dmabuf_mr(pd, 0, args.largest, (uint64_t)(uintptr_t)memory[DEVICE], dmabuf, rights);
    NEED(mr[DEVICE], "the dma-buf cannot be registered");
}

/* The address of RoCEv2 over IPv4 when there is one: the last of those GIDs. */
static void find_gid(void) {
    union ibv_gid gid;
    static const uint8_t v4[12] = {[10] = 0xff, 0xff};
    for (int n = 0; n < 16 && !ibv_query_gid(context, 1, n, &gid); n++)
        if (!memcmp(gid.raw, v4, 12)) gid_index = n;
    NEED(!ibv_query_gid(context, 1, gid_index, &gid), "no GID");
    memcpy(own.gid, gid.raw, 16);
}

static void open_rdma(void) {
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    for (int n = 0; n < count; n++)
        if (!strcmp(ibv_get_device_name(list[n]), args.rdma)) context = ibv_open_device(list[n]);
    NEED(context, "there is no RDMA device %s", args.rdma);
    struct ibv_port_attr port;
    NEED(!ibv_query_port(context, 1, &port), "port 1");
    ethernet = port.link_layer == IBV_LINK_LAYER_ETHERNET;
    own.lid = port.lid;
    find_gid();
    NEED((pd = ibv_alloc_pd(context)), "protection domain");
    NEED((cq = ibv_create_cq(context, 2 * DEPTH, NULL, NULL, 0)), "completion queue");
    memory[SYSTEM] = mmap(NULL, args.largest, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(memory[SYSTEM] != MAP_FAILED, "memory");
    int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    mr[SYSTEM] = ibv_reg_mr(pd, memory[SYSTEM], args.largest, rights);
    NEED(mr[SYSTEM], "system memory cannot be registered");
    register_bar();
}

static void put(const void *data, size_t len) {
    NEED(write(control, data, len) == (ssize_t)len, "the other end is gone");
}

static void get(void *data, size_t len) {
    for (size_t done = 0; done < len;) {
        ssize_t n = read(control, (char *)data + done, len - done);
        if (n <= 0) errno = n ? errno : 0;
        NEED(n > 0, "the other end is gone");
        done += n;
    }
}

/* A new pair of queue pairs, connected. */
static void join(void) {
    if (qp) NEED(!ibv_destroy_qp(qp), "the queue pair cannot be destroyed");
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1}};
    NEED((qp = ibv_create_qp(pd, &init)), "queue pair");
    own.qpn = qp->qp_num;
    for (int place = DEVICE; place <= SYSTEM; place++) {
        own.rkey[place] = mr[place]->rkey;
        own.address[place] = (uint64_t)(uintptr_t)memory[place];
    }
    put(&own, sizeof own);
    get(&peer, sizeof peer);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ};
    NEED(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "INIT");
    memset(&attr, 0, sizeof attr);
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = ethernet ? IBV_MTU_1024 : IBV_MTU_4096;
    attr.dest_qp_num = peer.qpn;
    attr.max_dest_rd_atomic = 8;
    attr.min_rnr_timer = 12;
    attr.ah_attr.dlid = peer.lid;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.is_global = ethernet;
    memcpy(attr.ah_attr.grh.dgid.raw, peer.gid, 16);
    attr.ah_attr.grh.sgid_index = gid_index;
    attr.ah_attr.grh.hop_limit = 64;
    NEED(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), "RTR");
    memset(&attr, 0, sizeof attr);
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = 18;
    attr.retry_cnt = attr.rnr_retry = 7;
    attr.max_rd_atomic = 8;
    NEED(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                        IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC), "RTS");
    /* Neither sends before both are ready. */
    char ready = 'r';
    put(&ready, 1);
    get(&ready, 1);
}

static struct ibv_sge local(enum place place, size_t len) {
    return (struct ibv_sge){(uint64_t)(uintptr_t)memory[place], len, mr[place]->lkey};
}

static void post(enum ibv_wr_opcode opcode, enum place from, enum place to, size_t len) {
    struct ibv_sge sge = local(from, len);
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED}, *bad;
    wr.wr.rdma.remote_addr = peer.address[to];
    wr.wr.rdma.rkey = peer.rkey[to];
    NEED(!(errno = ibv_post_send(qp, &wr, &bad)), "a request cannot be posted");
}

static void post_receive(enum place place, size_t len) {
    struct ibv_sge sge = local(place, len);
    struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;
    NEED(!(errno = ibv_post_recv(qp, &wr, &bad)), "a receive cannot be posted");
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

/* Status of the next completion. */
static enum ibv_wc_status completed(void) {
    struct ibv_wc wc;
    double begin = seconds();
    int n;
    while (!(n = ibv_poll_cq(cq, 1, &wc)))
        NEED(seconds() - begin < 60, "no completion in a minute");
    NEED(n == 1, "the completion queue cannot be read");
    return wc.status;
}

static void done(const char *what) {
    enum ibv_wc_status status = completed();
    errno = 0;
    NEED(status == IBV_WC_SUCCESS, "%s: %s", what, ibv_wc_status_str(status));
}

/* Byte n of contents `seed`, which differ from one another everywhere. */
static uint8_t byte(uint8_t seed, size_t n) { return (uint8_t)(n * 31 ^ n >> 8 ^ n >> 16) + seed; }

static void fill(enum place place, uint8_t seed, size_t len) {
    for (size_t n = 0; n < len; n++) ((volatile uint8_t *)memory[place])[n] = byte(seed, n);
}

/* First byte that is not as it should be; `len` when all are. */
static size_t differs(enum place place, uint8_t seed, size_t len) {
    size_t n = 0;
    while (n < len && ((volatile uint8_t *)memory[place])[n] == byte(seed, n)) n++;
    return n;
}

/* What the client asks of the server: a letter, a place, a seed, a length; answered by a number. */
struct order {
    char what;
    uint8_t place, seed;
    uint64_t len;
};

static uint64_t order(char what, enum place place, uint8_t seed, size_t len) {
    struct order order = {what, place, seed, len};
    uint64_t answer;
    put(&order, sizeof order);
    get(&answer, sizeof answer);
    return answer;
}

static void serve(void) {
    for (;;) {
        struct order order;
        get(&order, sizeof order);
        errno = 0;
        NEED(order.len <= args.largest && order.place <= SYSTEM, "an order makes no sense");
        uint64_t answer = 0;
        switch (order.what) {
        case 'f': fill(order.place, order.seed, order.len); break;
        case 'c': answer = differs(order.place, order.seed, order.len); break;
        case 'r': post_receive(order.place, order.len); break;
        case 'w': done("a receive"); break;
        case 'd': set_decode(false); break;
        case 'e':
            set_decode(true);
            NEED(!ibv_dereg_mr(mr[DEVICE]), "the old registration cannot be ended");
            register_bar();
            break;
        }
        put(&answer, sizeof answer);
        if (order.what == 'e') join();
        if (order.what == 'q') return;
    }
}

static const char *const KINDS[] = {"write", "read", "send"};

/* One message of each kind between the places, compared at the end where it arrives. */
static void compare(enum place from, enum place to, size_t len) {
    static uint8_t seed;
    for (int kind = 0; kind < 3; kind++) {
        size_t found;
        seed += 3;
        if (kind == 1) {
            order('f', to, seed, len);
            fill(from, seed + 1, len);
            post(IBV_WR_RDMA_READ, from, to, len);
            done("a read");
            found = differs(from, seed, len);
        } else {
            fill(from, seed, len);
            order('f', to, seed + 1, len);
            if (kind == 2) order('r', to, 0, len);
            post(kind == 2 ? IBV_WR_SEND : IBV_WR_RDMA_WRITE, from, to, len);
            done(KINDS[kind]);
            if (kind == 2) order('w', to, 0, 0);
            found = order('c', to, seed, len);
        }
        errno = 0;
        NEED(found == len, "%s of %zu bytes, own %s, other's %s: byte %zu is wrong", KINDS[kind], len, NAMES[from],
             NAMES[to], found);
    }
    printf("data own=%s other=%s bytes=%zu ok\n", NAMES[from], NAMES[to], len);
}

static void measure(enum ibv_wr_opcode opcode, enum place from, enum place to, size_t len) {
    size_t posted = 0, count = 0, most = len >= 1 << 20 ? 4 : DEPTH / 2;
    double begin = seconds(), now = begin;
    while (now - begin < args.ms * 1e-3 || posted != count) {
        while (posted - count < most && now - begin < args.ms * 1e-3) {
            post(opcode, from, to, len);
            posted++;
        }
        done("a measurement");
        count++;
        now = seconds();
    }
    printf("bandwidth kind=%s own=%s other=%s bytes=%zu mib_per_s=%.1f\n",
           opcode == IBV_WR_RDMA_READ ? "read" : "write", NAMES[from], NAMES[to], len,
           count * len / (now - begin) / (1 << 20));
}

/* The server's device is not there for a while. */
static void take_away(void) {
    size_t len = args.sizes[0];
    order('f', DEVICE, 77, len);
    order('d', 0, 0, 0);
    post(IBV_WR_RDMA_WRITE, SYSTEM, DEVICE, len);
    enum ibv_wc_status status = completed();
    errno = 0;
    NEED(status == IBV_WC_REM_ACCESS_ERR, "a write to memory that was taken away ended with: %s",
         ibv_wc_status_str(status));
    order('e', 0, 0, 0);
    join();
    NEED(order('c', DEVICE, 77, len) == len, "memory that was taken away was written to");
    compare(SYSTEM, DEVICE, len);
    printf("revoked status=%d ok\n", status);
}

static void connect_to(const char *address, const char *port) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = address ? 0 : AI_PASSIVE, .ai_family = AF_INET}, *found;
    NEED(!getaddrinfo(address, port, &hints, &found), "%s port %s is no address", address, port);
    int s = socket(found->ai_family, SOCK_STREAM, 0), on = 1;
    NEED(s >= 0, "socket");
    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (!address) {
        NEED(!bind(s, found->ai_addr, found->ai_addrlen) && !listen(s, 1), "port %s", port);
        control = accept(s, NULL, NULL);
        NEED(control >= 0, "accept");
        return;
    }
    double begin = seconds();
    while (connect(s, found->ai_addr, found->ai_addrlen)) {
        NEED(seconds() - begin < 30, "%s does not answer", address);
        close(s);
        usleep(200000);
        s = socket(found->ai_family, SOCK_STREAM, 0);
    }
    control = s;
}

int main(int argc, char **argv) {
    const char *port = "18600";
    int letter;
    char *sizes = "4096,65536,1048576";
    while ((letter = getopt(argc, argv, "d:g:p:s:t:")) != -1) switch (letter) {
        case 'd': args.rdma = optarg; break;
        case 'g': args.pci = optarg; break;
        case 'p': port = optarg; break;
        case 's': sizes = optarg; break;
        case 't': args.ms = atoi(optarg); break;
        default: return 2;
    }
    if (!args.rdma || !args.pci) return fprintf(stderr, "gpudirect: -d and -g are needed\n"), 2;
    for (sizes = strdup(sizes); args.count < MAX_SIZES && (sizes = strtok(args.count ? NULL : sizes, ","));) {
        size_t size = strtoull(sizes, NULL, 0);
        args.sizes[args.count++] = size;
        if (size > args.largest) args.largest = (size + 4095) & ~4095ul;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    open_device();
    set_decode(true);
    map_bar();
    open_rdma();
    connect_to(argv[optind], port);
    join();
    if (!argv[optind]) {
        serve();
        return 0;
    }
    for (size_t n = 0; n < args.count; n++)
        for (int pair = 0; pair < 4; pair++) compare(pair >> 1, pair & 1, args.sizes[n]);
    for (size_t n = 0; args.ms && n < args.count; n++)
        for (int pair = 0; pair < 4; pair++) {
            measure(IBV_WR_RDMA_WRITE, pair >> 1, pair & 1, args.sizes[n]);
            measure(IBV_WR_RDMA_READ, pair >> 1, pair & 1, args.sizes[n]);
        }
    take_away();
    order('q', 0, 0, 0);
    return 0;
}
