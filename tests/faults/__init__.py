"""What happens to long runs: killed processes, disks that fill and break, damaged files, input nobody meant."""
