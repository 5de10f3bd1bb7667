"""The real coordinator on a virtual clock: costs, workloads, faults, sweeps."""
