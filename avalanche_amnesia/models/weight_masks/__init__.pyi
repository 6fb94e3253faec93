from .subnet import SubnetModel as SubnetModel
